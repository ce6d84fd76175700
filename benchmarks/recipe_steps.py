"""Fifty steps with each part of a recipe, by mbc and by PyTorch from equal states, in fp32 and in bf16.

A small network with batch normalisation trains on random data: in float64 by PyTorch, and in the tested precision by
mbc and by PyTorch. All parameters, statistics and moving averages after the last step are compared with float64. mbc's
median error over them may be at most twice PyTorch's. Activations are smooth, because one ReLU on the other side of
zero causes a larger error than the rounding of 50 steps. Errors under LEAST are the luck of a draw and count as LEAST.
PyTorch has no LARS and LAMB; tests compare these with the formulas of their papers.

    python benchmarks/recipe_steps.py [--steps 50] [--device cuda|cpu] [--workers N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from modules import Job, build, errors, median, open_module
from planner import processes
from record import attempt, results, show, start

from mbc.bench.torch_network import TorchNetwork
from mbc.ir.averages import averages_of
from mbc.ir.graph import Role
from mbc.ir.parameter_groups import is_trained
from mbc.runtime.initial_states import initial
from mbc.source import Source

TIMES_TORCH, LEAST = 2.0, 1e-6
LEARNING_RATE = 0.02
BATCH, CLASSES = 16, 6
NETWORK = """
network small(batch = %d) {
  input image[batch, 8, 12, 12] : float
  input %s
  x = image |> conv(16, 3, pad=1) @first |> bn |> gelu
  y = x |> conv(16, 3, pad=1) @second |> bn |> gelu
  logits = x + y |> global_avgpool |> flatten |> linear(%d) @head
  output logits
  loss (logits, target) |> %s
}
train { %s }
"""
SGD = "optimizer = sgd(momentum=0.9, weight_decay=1e-3)"
ENTROPY = "softmax_cross_entropy"
COLUMNS = ("name", "median", "torch_median", "worst", "torch_worst", "passed")


@dataclass(frozen=True)
class Feature:
    """A part of a recipe. `target`: C for class numbers, P for probabilities, F for numbers."""

    name: str
    recipe: str = SGD
    loss: str = ENTROPY
    target: str = "C"

    def job(self, precision: str) -> Job:
        """Return the job of the feature's network."""
        declared = "target[batch] : class" if self.target == "C" else f"target[batch, {CLASSES}] : float"
        text = NETWORK % (BATCH, declared, CLASSES, self.loss, self.recipe)
        return Job(self.name, Source("small.mbc", text), (("train.precision", precision),))


FEATURES = (
    Feature("sgd"),
    Feature("nesterov", "optimizer = sgd(momentum=0.9, nesterov=true, weight_decay=1e-3)"),
    Feature("adamw", "optimizer = adamw(weight_decay=0.1)"),
    Feature("clip_norm", f"{SGD} clip_norm = 0.1"),
    Feature("clip_value", f"{SGD} clip_value = 0.002"),
    Feature("accumulate", f"{SGD} accumulate = 4"),
    Feature("ema", f"{SGD} ema = 0.9"),
    Feature("no_decay", "optimizer = adamw(weight_decay=0.5) no_decay = norm_and_bias"),
    Feature("groups", f'{SGD} groups = (group("head.*", rate=3), group("first.*", rate=0.1, weight_decay=0))'),
    Feature("frozen", f'{SGD} frozen = ("second.*")'),
    Feature("together", f"{SGD} clip_norm = 0.1 ema = 0.9 no_decay = norm_and_bias accumulate = 2"),
    Feature("smoothing", loss=f"{ENTROPY}(smoothing=0.1)"),
    Feature("class_weights", loss=f"{ENTROPY}(class_weights=(1, 2, 3, 1, 0.5, 1), ignore_index=3)"),
    Feature("soft targets", loss=ENTROPY, target="P"),
    Feature("kl_divergence", loss="kl_divergence", target="P"),
    Feature("binary_cross_entropy", loss="binary_cross_entropy", target="P"),
    Feature("l1", loss="l1", target="F"),
    Feature("smooth_l1", loss="smooth_l1(beta=0.5)", target="F"),
    Feature("mse", loss="mse", target="F"),
)


def mini_batches(feature: Feature, rows: int, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the mini-batches."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        image = random.standard_normal((rows, 8, 12, 12)).astype(np.float32)
        if feature.target == "C":
            yield image, random.integers(0, CLASSES, rows).astype(np.int32)
        else:
            numbers = random.standard_normal((rows, CLASSES)).astype(np.float32)
            yield image, numbers if feature.target == "F" else np.exp(numbers) / np.exp(numbers).sum(1, keepdims=True)


def by_torch(job: Job, feature: Feature, steps: int, device: str, dtype: Any, autocast: Any) -> dict[str, np.ndarray]:
    """Return the states after the steps of PyTorch, with its own optimizers, clipping and averages."""
    lowered = job.lowered()
    network, rule = lowered.network, lowered.optimizer
    states = {s.value: initial(s.value, network.values[s.value].type, s.initializer, 0) for s in network.states}
    module = TorchNetwork(network, states, dtype, device, True).train()
    optimizer = module.optimizer(rule, LEARNING_RATE)
    swa = torch.optim.swa_utils
    average: Any = swa.AveragedModel(module, multi_avg_fn=swa.get_ema_multi_avg_fn(rule.ema), use_buffers=True)
    for image, target in mini_batches(feature, BATCH * rule.accumulate, steps):
        optimizer.zero_grad()
        for part in range(rule.accumulate):
            rows = slice(part * BATCH, (part + 1) * BATCH)
            with torch.autocast(device, autocast, enabled=autocast is not None):
                loss, _ = module.forward(module.place((image[rows], target[rows])))
            (loss / rule.accumulate).backward()
        module.clip(rule)
        optimizer.step()
        average.update_parameters(module)
    # mbc keeps no averages of frozen parameters, which equal the parameters.
    averaged = average.module.states() if rule.ema else {}
    parameters = (v for v in network.values.values() if v.role is Role.PARAMETER)
    frozen = {v.name for v in parameters if not is_trained(rule, v)}
    return module.states() | {f"average of {n}": value for n, value in averaged.items() if n not in frozen}


def by_mbc(job: Job, feature: Feature, steps: int, device: str, folder: Path) -> dict[str, np.ndarray]:
    """Return the states after the steps of mbc."""
    where: Any = job.plan()
    if device == "cuda":
        built = build(job, folder)
        if built.failed:
            raise RuntimeError(built.failed)
        where = built.folder
    module = open_module(where, device)
    try:
        for image, target in mini_batches(feature, module.step_batch, steps):
            module.step(image, target, lr=LEARNING_RATE)
        graph = module.plan.graph
        names = {state.value for state in job.lowered().network.states}
        result = {name: np.asarray(module.state(name), np.float64) for name in names}
        averages = averages_of(graph) if graph.optimizer.ema else {}
        held = {f"average of {n}": np.asarray(module.state(average), np.float64) for n, average in averages.items()}
        return result | held
    finally:
        module.close()


def row_of(feature: Feature, precision: str, steps: int, device: str) -> dict[str, Any]:
    """Return the row of a feature: the distance of mbc's states from PyTorch's."""
    job = feature.job(precision)
    gpu = "auto" if device == "cuda" else "h200"
    job = Job(job.name, job.source, job.settings, gpu=gpu)
    exact = by_torch(job, feature, steps, device, torch.float64, None)
    autocast = torch.bfloat16 if precision == "bf16" else None
    theirs = errors(by_torch(job, feature, steps, device, torch.float32, autocast), exact)
    with tempfile.TemporaryDirectory() as folder:
        ours = by_mbc(job, feature, steps, device, Path(folder) / "package")
    if missing := exact.keys() - ours.keys():
        raise RuntimeError(f"mbc has no {', '.join(sorted(missing))}")
    result = errors(ours, exact)
    row = {
        "states": len(result), "median": median(result.values()), "torch_median": median(theirs.values()),
        "worst": max(result.values()), "torch_worst": max(theirs.values()),
    }  # fmt: skip
    return row | {"passed": row["median"] <= TIMES_TORCH * max(row["torch_median"], LEAST)}


def tried(number: int, precision: str, steps: int, device: str) -> dict[str, Any]:
    """Return the row of a feature, by its number, or why it failed. Runs in a process of its own."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    feature = FEATURES[number]
    return attempt(lambda: row_of(feature, precision, steps, device), f"{feature.name} {precision}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="rows at a time (default 1)")
    arguments = parser.parse_args()
    wanted = [n for n, f in enumerate(FEATURES) if not arguments.only or f.name in arguments.only]
    held = results(f"recipe_steps_{arguments.device}", again=True, steps=arguments.steps, device=arguments.device)
    with processes(arguments.workers) as pool:
        rows = [
            pool.submit(tried, number, precision, arguments.steps, arguments.device)
            for precision in ("fp32", "bf16")
            for number in wanted
        ]
        for row in as_completed(rows):
            held.put(row.result())
            show([row.result()], COLUMNS)
    held.arrange([f"{FEATURES[number].name} {precision}" for precision in ("fp32", "bf16") for number in wanted])
    show(list(held.rows.values()), COLUMNS)
    broken = [row["name"] for row in held.rows.values() if not row.get("passed")]
    print(f"the rule is {'broken by ' + ', '.join(broken) if broken else 'kept by all'}")


if __name__ == "__main__":
    start(main)
