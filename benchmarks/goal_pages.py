"""Tables of goals that were missed or reached, and of correctness, for `pictures.py`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from tables import Row, document, rows_of, table

# For each results file: what was asked, and what a row reached.
GOALS: Mapping[str, tuple[str, Callable[[Row], str]]] = {
    "capped": (
        "step under a cap: as little slower than without one as the paper reports",
        lambda row: f"{row['loss']:.1%} slower, asked {row['most_loss']:.0%}",
    ),
    "fusion_steps": (
        "steps with generated fusion beside those before it: none slower by more than 1 %",
        lambda row: f"{row['ratio'] - 1:.1%} slower",
    ),
    "kernel_tests": (
        "all test cases of mbc's own kernels agree with float64, without an error of memcheck",
        lambda row: f"{row['failed_cases']} of {row['failed_cases'] + row['passed_cases']} cases failed",
    ),
    "lending_4": (
        "three GPUs borrow from a fourth: 95 % of the summed speeds",
        lambda row: f"{row['of_summed_speeds']:.1%}",
    ),
    "many_gpus": (
        "two H100s: efficiency, times over DDP, over DDP in one CUDA graph",
        lambda row: _many(row, {"resnet50 256": (0.985, 1.6, 1.4), "resnet50 64": (0.97, 3.0, 1.4)}),
    ),
    "many_gpus_4": (
        "four H100s: efficiency, times over DDP, over DDP in one CUDA graph",
        lambda row: _many(row, {"resnet50 256": (0.9875, 1.6, 1.4), "resnet50 32": (0.95, 3.0, 1.4)}),
    ),
    "peer_memory": (
        "ResNet-152 at 598 in 16 GB beside a GPU that lends: at most 5 % slower",
        lambda row: f"{row['loss']:.1%} slower",
    ),
    "planning_time": (
        "seconds of one core to plan",
        lambda row: f"{row.get('command_s', row.get('plan_s')):.0f} s, asked {row['limit_s']:.0f}",
    ),
    "predictions_fp32": (
        "predicted step within 5 % of the measured one (below 1 ms: 10 %)",
        lambda row: f"{abs(row['predicted_over_measured'] - 1):.1%} off",
    ),
    "rank_failures_4": (
        "four ranks, one killed: all end within 10 s, and the training resumes from a checkpoint",
        lambda row: (
            f"ended within {row['slowest_s']:.1f} s; {row['with_checkpoint']} of {row['trials']} were killed "
            "after a checkpoint, so that none was resumed"
        ),
    ),
    "recipe": (
        "clipping, moving averages and groups: at most 1 % of ResNet-50's step",
        lambda row: f"{row['over']:.2%}",
    ),
    "posed": (
        "steps of a GPU that poses as an older one, beside `torch.compile` with all that the GPU has",
        lambda row: f"{row['speedup']:.2f}x, asked {row['asked']}x",
    ),
    "posed_kernels": (
        "kernels by mma.sync reach 60 % of its rate or of the bandwidth at their best request",
        lambda row: f"{max(row['peak_share'], row['memory_share']):.0%}",
    ),
    "two_machines": (
        "collectives of two GPUs through sockets, predicted within 15 %",
        lambda row: f"off by {row['error']:.0%}",
    ),
}
# Missed goals whose scripts were deleted, and the decision pages that keep the figures.
DECIDED: Mapping[str, str] = {
    "ResNet-50 on unlike GPUs": "043-rows-of-unlike-gpus.md",
    "four GPUs that offload to one host": "059-host-copies-of-several-gpus.md",
    "time to a target of `mbc tune` on the synthetic task": "060-tuner.md",
    "three networks in half of their memory": "072-converted-back.md",
}
# Plans of the rows above that were measured since: their predictions add nothing.
ALSO_MEASURED = ("capped_planned", "peer_memory_planned")


def goal_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return no pictures and this section of the page.

    Raises:
        KeyError: A results file has a row that missed its goal, and `GOALS` does not describe the goal.
    """
    missed: list[list[str]] = []
    reached: list[str] = []
    for path in sorted(results.glob("*.json")):
        rows = [row for row in rows_of(results, path.stem) if isinstance(row.get("passed"), bool)]
        failed = [row for row in rows if not row["passed"]]
        if not rows or path.stem in ALSO_MEASURED:
            continue
        if failed:
            asked, figure = GOALS[path.stem]
            missed.append([f"`{path.stem}`", asked, "; ".join(f"{row['name']}: {figure(row)}" for row in failed)])
        reached.append(f"`{path.stem}` {len(rows) - len(failed)} of {len(rows)}")
    if not reached:
        return {}, []
    page = ["## Goals that were missed", ""]
    page += table(["results", "goal", "missed by"], missed)
    page += [
        "Goals of scripts that no longer exist were missed as well. Decision pages have the figures: "
        f"{'; '.join(f'{what} ([{page[:3]}](../docs/decisions/{page}))' for what, page in DECIDED.items())}.",
        "",
    ]
    page += [f"Rows that reached their goal, by results file: {', '.join(reached)}.", ""]
    return {}, page


def correctness_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return no pictures, and a table of results that were compared with other implementations, or proved."""
    lines = [*_gradients(results), *_trainings(results), *_drawn(results)]
    note = (
        "What racecheck and initcheck report, and why, is in decisions "
        "[051](../docs/decisions/051-hostile-files-and-sudden-ends.md) and "
        "[003](../docs/decisions/003-initcheck-in-fp32-only.md). `warp_probe` is a kernel without a race."
    )
    page = ["## Correctness", "", *table(["what", "GPU", "result"], lines), note, ""] if lines else []
    return {}, page


def _gradients(results: Path) -> list[list[str]]:
    lines: list[list[str]] = []
    for name in ("gradients_cpu", "gradients_cuda", "gradients_cuda_batch64"):
        rows = [row for row in rows_of(results, name) if row["precision"] == "fp32"]
        gpu = _gpu(results, name)
        operations = [row["worst"] for row in rows if row["kind"] == "operation"]
        networks = {row["name"]: row["median"] / row["torch_median"] for row in rows if row["kind"] == "network"}
        if operations:
            lines.append([
                f"gradients of {len(operations)} operations in fp32 against float64, worst parameter", gpu,
                f"at most {max(operations):.1e}",
            ])  # fmt: skip
        if networks:
            least, worst = min(networks, key=networks.__getitem__), max(networks, key=networks.__getitem__)
            batch = ", batch 64" if name.endswith("64") else ""
            lines.append([
                f"gradients of {len(networks)} networks in fp32{batch}, median error over PyTorch's own", gpu,
                f"{networks[least]:.2g} ({least}) to {networks[worst]:.2f} ({worst})",
            ])  # fmt: skip
    return lines


def _trainings(results: Path) -> list[list[str]]:
    lines: list[list[str]] = []
    steps = [row for row in rows_of(results, "steps20") if "statistics" in row]
    if steps:
        *each, mean = steps
        within = sum(row["worst"] <= 2 * row["torch_worst"] for row in each)
        lines.append([
            f"{len(each)} steps of ResNet-18 in fp32, each from PyTorch's state: error over PyTorch's own",
            _gpu(results, "steps20"),
            f"{mean['median'] / mean['torch_median']:.2f} by the median parameter, "
            f"{mean['worst'] / mean['torch_worst']:.2f} by the worst, in the mean of the steps; by the worst parameter "
            f"of a single step {within} of {len(each)} are within twice PyTorch's error",
        ])  # fmt: skip
    losses = rows_of(results, "training_loss")
    if losses:
        apart = ", ".join(f"{row['name']} {row['apart']:.2%}" for row in losses)
        lines.append(["loss of ResNet-18 after 200 steps, apart from PyTorch's", _gpu(results, "training_loss"), apart])
    for name in ("digits_cpu", "digits_cuda"):
        accuracies = [row["test_accuracy"] for row in rows_of(results, name)]
        if accuracies:
            lines.append([
                f"test accuracy of the digits, {len(accuracies)} trainings", _gpu(results, name),
                f"{min(accuracies):.1%} to {max(accuracies):.1%}",
            ])  # fmt: skip
    lines += _sanitizer(results)
    memory = [row for row in rows_of(results, "memory_fp32") if "arena_equal" in row]
    if memory:
        equal = sum(row["arena_equal"] for row in memory)
        lines.append([
            "bytes of the arena predicted and taken, examples in fp32", _gpu(results, "memory_fp32"),
            f"{equal} of {len(memory)} equal",
        ])  # fmt: skip
    return lines


def _sanitizer(results: Path) -> list[list[str]]:
    path = results / "sanitizer.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    runs = re.findall(r"^(.+) (\w+check): exit (\d+), (.*)$", text, re.MULTILINE)
    lines: list[list[str]] = []
    for tool in dict.fromkeys(run[1] for run in runs):
        clean = sum(run[1] == tool and run[2] == "0" for run in runs)
        wrong = [
            f"{name} ({_errors(said)})" for name, its, code, said in runs if its == tool and code not in ("0", "124")
        ]
        cut = [name for name, its, code, _ in runs if its == tool and code == "124"]
        said = [f"{clean} clean", *(f"**{len(wrong)} with findings**: {'; '.join(wrong)}" for _ in wrong[:1])]
        said += [f"**{len(cut)} not finished**: {', '.join(cut)}" for _ in cut[:1]]
        gpu = re.search(r"^NVIDIA (\w+)", text, re.MULTILINE)
        lines.append([f"compute-sanitizer, {tool}, single steps", gpu[1] if gpu else "-", "; ".join(said)])
    return lines


def _errors(summary: str) -> str:
    count = re.search(r"(\d+) errors", summary)
    return f"{int(count[1]):,} errors" if count else summary


def _drawn(results: Path) -> list[list[str]]:
    lines: list[list[str]] = []
    imported = [row["times_torch"] for row in rows_of(results, "imported_cuda")]
    if imported:
        lines.append([
            f"fp32 forward pass of {len(imported)} imported networks: error over that of PyTorch's fp32",
            _gpu(results, "imported_cuda"),
            f"{min(imported):.2f} to {max(imported):.2f}, median {median(imported):.2f}",
        ])  # fmt: skip
    programs = document(results, "random_programs")
    if programs:
        whole, planned = (_verdicts(programs[key]) for key in ("verdicts", "planned"))
        lines.append([
            f"{programs['programs']:,} random PyTorch programs of {programs['kinds']} ATen operations, imported and "
            "compared with PyTorch in fp64", "no GPU",
            f"{whole}; of {sum(programs['planned'].values()):,} that were also planned within a budget: {planned}",
        ])  # fmt: skip
    tests = document(results, "onnx_node_tests")
    if tests:
        counts = tests["counts"]
        lines.append([
            f"{tests['tests']:,} of ONNX's own tests of operators", "no GPU",
            f"{counts['equal']} equal, **{counts['refused']} refused**, {counts['different']} different",
        ])  # fmt: skip
    samples = document(results, "module_db")
    if samples:
        lines.append([
            f"{sum(samples['verdicts'].values())} of PyTorch's own samples of modules, with gradients", "no GPU",
            _verdicts(samples["verdicts"]),
        ])  # fmt: skip
    networks = rows_of(results, "planned_networks")
    if networks:
        outcomes, counts = (
            sum((Counter(row[key]) for row in networks), Counter[str]()) for key in ("outcomes", "counts")
        )
        wrong = [failure["why"].partition("\n")[0] for row in networks for failure in row["failures"]]
        lines.append([
            f"{outcomes.total()} random networks of the language, planned without a limit and at four budgets",
            "no GPU",
            f"{outcomes['right']} right, **{len(wrong)} wrong**{''.join(f' ({why})' for why in dict.fromkeys(wrong))}; "
            f"{counts['steps compared']:,} steps compared",
        ])  # fmt: skip
    mutants = document(results, "plan_mutants")
    if mutants:
        outcomes = mutants["outcomes"]
        lines.append([
            f"{mutants['cases']:,} changed plans", "no GPU",
            f"{outcomes['refused']:,} refused by the verifier, {outcomes['unchanged']:,} unchanged by the mutation, "
            f"{outcomes['equal']:,} shown to compute the same, {outcomes['unprovable']:,} neither refused nor "
            f"comparable, {len(mutants['failures'])} accepted wrongly",
        ])  # fmt: skip
    return lines


def _verdicts(counts: Mapping[str, int]) -> str:
    """Return the number of comparisons for each verdict; `different` is listed even if it is 0."""
    said = [f"{count:,} {verdict}" for verdict, count in counts.items() if verdict != "different"]
    return ", ".join([*said, f"**{counts.get('different', 0)} different**"])


def _many(row: Row, asked: Mapping[str, tuple[float, float, float]]) -> str:
    """Return the figures that a row of several GPUs reached, and the goals for them."""
    least = asked[row["name"]]
    keys = ("mbc_efficiency", "over_ddp", "over_whole")
    texts = [f"{row[key]:.3f}" if key == keys[0] else f"{row[key]:.2f}" if key in row else "not run" for key in keys]
    return ", ".join(f"{text} (asked {goal:g})" for text, goal in zip(texts, least, strict=True))


def _gpu(results: Path, name: str) -> str:
    file = document(results, name)
    gpu = file["gpu"] if file and not name.endswith("_cpu") else None
    return gpu.split()[1] if gpu else "no GPU"
