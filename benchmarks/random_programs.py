"""Random programs of PyTorch through export, import and interpreter: outputs, loss and all gradients in fp64.

A program is a module of 4 to 40 random operations (`program_vocabulary.py`): views, writes in place through views and
to their bases, branches, regions without gradients, shared and tied layers, odd shapes, random arguments. It is
exported, saved and read like a user's file, and compared with PyTorch within 1e-9 relative (`exactness.py`). One
program in ten is also planned for a GPU within a random memory budget, and the plan is stepped on the CPU. Programs
whose gradients PyTorch itself cannot reproduce under a change of 1e-13 in weights and inputs are left out.

Acceptance is counted by operation: an ATen operation of a refused program counts as refused if the refusal names it,
otherwise as accepted. `whole` counts only operations of accepted programs. Both are shares of all drawn operations.
Needs torch, no GPU.

    python benchmarks/random_programs.py --programs 30000 [--seed 0] [--workers 16] [--shard 1/4] [--planned-every 10]
    python benchmarks/random_programs.py --replay 123 [--cut]

Rows are kept in `build/random_programs.<seed>/`, so that another call continues. `--again` begins anew, and `--report`
writes the result of the existing rows. `--replay` prints a program and its verdict, `--cut` the fewest of its
statements that still have the verdict.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from exactness import Reference, Verdict, judge, reference
from program_draft import Draft, Text
from program_vocabulary import draw_operation
from record import ROOT, show, start, write

NAME = "random_programs"
SHAPES = (
    (2, 3, 7, 5), (3, 1, 9, 11), (2, 5, 7, 5), (4, 3, 9, 11), (2, 4, 8, 6), (3, 3, 6, 6), (2, 6, 5, 7), (3, 5, 9),
    (2, 3, 11), (4, 7), (3, 12),
)  # fmt: skip
STABLE = 1e-10  # how far gradients may move by a change of NOISE
NOISE = 1e-13
MOST_ATTEMPTS = 40


def drawn(seed: int, index: int) -> tuple[Text, str, Reference]:
    """Return the program with the number `index`, its loss, and PyTorch's results."""
    for attempt in range(MOST_ATTEMPTS):
        try:
            text, loss = _draft(f"{seed}/{index}/{attempt}")
        except (RuntimeError, ValueError):  # its end cannot be written: numbers too large, views that cannot be read
            continue
        expected = settled(text, loss, index)
        if expected is not None:
            return expected[0], loss, expected[1]
    raise RuntimeError(f"no program was drawn in {MOST_ATTEMPTS} attempts")


def _draft(seed: str) -> tuple[Text, str]:
    d = Draft(seed, random.Random(seed).choice(SHAPES))
    rank = len(d.text.shape)
    stem = d.chance(0.9)
    if stem:
        channels, width = d.text.shape[1], d.one_of(3, 4, 5, 6)
        layer = (
            f"nn.Linear({channels}, {width})" if rank == 2 else f"nn.Conv{rank - 2}d({channels}, {width}, 3, padding=1)"
        )
        d.let(d.layer(layer) + "(x)")
    wanted = 3 + int(37 * d.random.random() ** 3)
    count = tries = 0
    while count < wanted and tries < 4 * wanted:
        count += draw_operation(d)
        tries += 1
    return d.text, _head(d)


def _head(d: Draft) -> str:
    """Write the end of the program: logits for a cross entropy, or any tensor for a mean squared error."""
    x = d.pick(2)
    rank = len(d.shape(x))
    if d.chance(0.35):
        d.text.result = d.let(d.layer(f"nn.Conv2d({d.shape(x)[1]}, 3, 1)") + f"({x})") if rank == 4 else x
        return "mse"
    if rank > 2:
        axes = tuple(range(2, rank))
        pooled = [f"{x}.mean({axes})", f"{x}.flatten(1)", f"{x}.amax({axes})", f"{x}.sum({axes})"]
        pooled += [f"F.adaptive_avg_pool2d({x}, 1).flatten(1)"] if rank == 4 else []
        x = d.let(d.one_of(*pooled))
    d.text.result = d.let(d.layer(f"nn.Linear({d.shape(x)[1]}, {d.one_of(2, 3, 5)})") + f"({x})")
    return "softmax_cross_entropy"


def settled(text: Text, loss: str, seed: int) -> tuple[Text, Reference] | None:
    """Return a program that PyTorch can train, and PyTorch's results, or None if there is no such program.

    A write in place may destroy a value that a gradient needs. Such writes are left out, the latest first.
    """
    while True:
        try:
            expected = reference(text.module(seed), [text.input(seed)], loss)
            break
        except Exception:
            writes = [n for n, statement in enumerate(text.body) if _writes(statement)]
            if not writes:
                return None
            body = text.body[: writes[-1]] + text.body[writes[-1] + 1 :]
            text = replace(text, body=body)
    moved = reference(text.module(seed), [text.input(seed)], loss, NOISE)
    return (text, expected) if _alike(expected, moved) else None


def _writes(statement: str) -> bool:
    return (
        "_(" in statement
        or "inplace=True" in statement
        or "] = " in statement
        or "+= " in statement
        or "*= " in statement
    )


def _alike(a: Reference, b: Reference) -> bool:
    pairs = [(x, y) for x, y in zip((*a.outputs, *a.evaluated), (*b.outputs, *b.evaluated), strict=True)]
    pairs += [(g, b.gradients[n]) for n, g in a.gradients.items() if g is not None]
    trained = [g for g in a.gradients.values() if g is not None]
    scale = max((float(np.linalg.norm(g)) for g in trained), default=0.0)
    if not 1e-6 < scale < 1e6 or not np.isfinite(a.loss):
        return False
    return all(bool(np.linalg.norm(x - y) <= STABLE * max(float(np.linalg.norm(x)), 1e-3 * scale)) for x, y in pairs)


# ---- one after the other ----


class TooLong(BaseException):
    """Raised when a program takes longer than it may."""


def stop(*_: object) -> None:
    """Raise `TooLong` from a signal's handler."""
    raise TooLong


def verdict(seed: int, index: int, limit_s: float, planned: bool) -> tuple[Verdict, Text | None]:
    """Draw and judge the program with the number `index`."""
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    text: Text | None = None
    try:
        text, loss, expected = drawn(seed, index)
        return judge(
            text.module(index), [text.input(index)], loss, expected, f"{seed}/{index}" if planned else ""
        ), text
    except TooLong:
        return Verdict("timeout"), text
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def work(folder: Path, number: int, options: argparse.Namespace) -> None:
    """Judge every program of a worker that has no row yet; rows are lines of JSON."""
    os.nice(5)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    part, parts = (int(n) for n in options.shard.split("/"))
    rows = folder / f"{part}.{number}.jsonl"
    done = {row["index"] for path in folder.glob("*.jsonl") for row in read(path)}
    with rows.open("a", encoding="utf-8") as file:
        for index in range(options.programs):
            if index % parts != part - 1 or index // parts % options.workers != number or index in done:
                continue
            planned = bool(options.planned_every) and index % options.planned_every == 0
            started = time.perf_counter()
            rows.with_suffix(".at").write_text(str(index))
            created, text = verdict(options.seed, index, options.limit_s, planned)
            row: dict[str, Any] = {
                "index": index, "verdict": created.kind, "planned": planned, "operations": created.operations,
                "refused": created.refused, "seconds": round(time.perf_counter() - started, 2),
            }  # fmt: skip
            if created.kind != "equal":
                row["detail"] = created.detail
            if created.kind not in ("equal", "refused") and text is not None:
                row["code"] = text.code()
            file.write(json.dumps(row) + "\n")
            file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a worker. The last line may be cut off."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run(folder: Path, options: argparse.Namespace) -> None:
    """Run all workers to their end. A worker that dies is started again after the program that killed it."""
    context = multiprocessing.get_context("spawn")
    waiting = {n: context.Process(target=work, args=(folder, n, options)) for n in range(options.workers)}
    for process in waiting.values():
        process.start()
    while waiting:
        time.sleep(0.2)
        for number, process in [*waiting.items()]:
            if process.is_alive():
                continue
            del waiting[number]
            if process.exitcode:
                at = folder / f"{options.shard.partition('/')[0]}.{number}.at"
                if not at.exists():
                    raise SystemExit(f"a worker ended with {process.exitcode} before its first program")
                row = {"index": int(at.read_text()), "verdict": "traceback", "detail": f"exit {process.exitcode}"}
                with at.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
                    file.write("\n" + json.dumps({"operations": [], "refused": [], "planned": False, **row}) + "\n")
                waiting[number] = context.Process(target=work, args=(folder, number, options))
                waiting[number].start()


# ---- what came out ----


def summarise(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the totals, and a row for each operation.

    A row has the programs with the operation, how many of them were accepted, and how many refusals name it.
    """
    verdicts = Counter(row["verdict"] for row in rows)
    programs: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    named: Counter[str] = Counter()
    every = whole = refused = 0
    for row in rows:
        kinds = set(row["operations"])
        programs.update(kinds)
        named.update(kinds.intersection(row["refused"]))
        every += len(row["operations"])
        if row["verdict"] == "equal":
            accepted.update(kinds)
            whole += len(row["operations"])
        refused += sum(target in row["refused"] for target in row["operations"])
    table = [
        {"name": name, "programs": count, "accepted": accepted[name], "refused": named[name]}
        for name, count in programs.most_common()
    ]
    planned = [row for row in rows if row.get("planned")]
    totals = {
        "verdicts": dict(verdicts.most_common()),
        "operations": every,
        "kinds": len(programs),
        "accepted_programs": round(verdicts["equal"] / max(len(rows), 1), 4),
        "accepted_operations": round(1 - refused / max(every, 1), 4),
        "accepted_whole": round(whole / max(every, 1), 4),
        "planned": dict(Counter(row["verdict"] for row in planned).most_common()),
    }
    return totals, table


def reasons(rows: Sequence[dict[str, Any]]) -> Counter[str]:
    """Return the number of programs that each refused operation, with its reason, keeps out."""
    result: Counter[str] = Counter()
    for row in rows:
        lines = {line.strip() for line in row.get("detail", "").splitlines() if line.startswith("  ") and ": " in line}
        result.update({line.partition(": ")[2] for line in lines if not line.startswith(("at ", "instead"))})
    return result


def cut(text: Text, loss: str, seed: int, kind: str) -> Text:
    """Return the program with the fewest statements that still has the verdict."""
    n = len(text.body) - 1
    while n >= 0:
        tried = replace(text, body=text.body[:n] + text.body[n + 1 :])
        try:
            expected = reference(tried.module(seed), [tried.input(seed)], loss)
            if judge(tried.module(seed), [tried.input(seed)], loss, expected).kind == kind:
                text = tried
        except Exception:  # the statement is needed
            pass
        n -= 1
    code = "\n".join(text.body)
    return replace(text, held=[line for line in text.held if _name_of(line) in code])


def _name_of(line: str) -> str:
    if "register_buffer" in line:
        return line.split("'")[1]
    return "self." if "].weight" in line else line.split(" = ")[0].partition(".weight")[0]


def replay(options: argparse.Namespace) -> None:
    """Print the program with the number `index` and its verdict."""
    text, loss, expected = drawn(options.seed, options.replay)
    seed = options.replay
    outcome = judge(
        text.module(seed), [text.input(seed)], loss, expected, f"{options.seed}/{seed}" if options.planned else ""
    )
    if options.cut:
        text = cut(text, loss, seed, outcome.kind)
        outcome = judge(text.module(seed), [text.input(seed)], loss)
    print(
        f"{text.code()}\nmodel, x, loss = Drawn(), torch.randn{text.shape}, '{loss}'\n{outcome.kind}: {outcome.detail}"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shard", default="1/1", help="part i of n: every nth program")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one program")
    parser.add_argument("--planned-every", type=int, default=10, help="0: plan none")
    parser.add_argument("--again", action="store_true", help="take none of the rows that are there")
    parser.add_argument("--report", action="store_true", help="judge no more programs: write what the rows say")
    parser.add_argument("--replay", type=int, help="print the program of this index")
    parser.add_argument("--cut", action="store_true", help="with --replay: the least of it")
    parser.add_argument("--planned", action="store_true", help="with --replay: plan it, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replay is not None:
        replay(options)
        return
    folder = ROOT / "build" / f"{NAME}.{options.seed}"
    if options.again:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if not options.report:
        run(folder, options)
    rows = sorted(
        {r["index"]: r for path in folder.glob("*.jsonl") for r in read(path)}.values(), key=lambda r: r["index"]
    )
    totals, table = summarise(rows)
    wrong = [row for row in rows if row["verdict"] not in ("equal", "refused")]
    why = dict(reasons(rows).most_common(60))
    seconds = round(time.perf_counter() - started)
    write(NAME, table, programs=len(rows), seed=options.seed, **totals, reasons=why, wrong=wrong, seconds=seconds)
    show(table, ("name", "programs", "accepted", "refused"))
    print(json.dumps(totals, indent=1))
    if wrong:
        raise SystemExit(f"{len(wrong)} programs are neither equal nor refused; the first: {wrong[0]['index']}")


if __name__ == "__main__":
    start(main)
