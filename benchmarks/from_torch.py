"""Networks that mbc was never tuned for, trained by `mbc.from_torch` and by PyTorch in the same run.

Fifteen networks of timm and four of torchvision train in bf16 at 224 pixels: by PyTorch's plain loop, by
`torch.compile`, by `torch.compile` with CUDA graphs, by `mbc.from_torch`, and by `mbc.module` with PyTorch's update.
Each of these contenders is a process of its own with a limit of time (`from_torch_contenders.py`). PyTorch's three
contenders compile side by side and are timed one after another.

    python benchmarks/from_torch.py [--only NAME,NAME] [--for SECONDS] [--measure-for 90s] [--ahead 3] [--ours module]
    python benchmarks/from_torch.py --device cpu --only torchvision/squeezenet1_1 --batch 2 --size 64

Figures named `*_ms` are step times. `module_share` is the time of `from_torch` over that of `mbc.module`, and `call_us`
the host's time of a call of the latter's forward and backward pass. `speedup` is over the fastest of PyTorch's
contenders. `memory_ratio` is the memory that mbc takes over the memory that this contender's allocator reserved; rows
whose step is slower have none. `first_step_s` is the time from the call of `from_torch` to the first loss. `loss_error`
is the largest relative difference of the first five losses from those of PyTorch's plain loop, and `torch_loss_error`
that of its compiled steps; networks that draw random numbers have neither.

Rows are written one by one. Another call continues with the rows that are missing or failed. Rows of `--ours module`
are in a file of their own (`results/module_cuda.json`). On a CPU the times mean nothing: such a run only shows that
everything works.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from from_torch_contenders import MODES, SIZE, Request
from own_process import POLL_S, in_own_process
from record import attempt, environment, need_gpu, results, show, start

# A seed drew these among timm's models of 224 pixels (decision 062). Values are rows of a mini-batch.
DRAWN = {
    f"timm/{name}": rows
    for rows, names in {
        64: (
            "deit3_small_patch16_224", "res2net50_14w_8s", "skresnext50_32x4d", "vit_small_resnet26d_224", "dla102x2",
            "focalnet_small_lrf", "repvgg_b1g4", "resnetv2_34d", "hgnet_small", "hrnet_w40",
        ),
        128: ("shvit_s1", "convnext_atto_rms", "lcnet_075", "fbnetc_100", "inception_next_atto"),
    }.items()
    for name in names
}  # fmt: skip
# Networks whose speed was asked for by name: rows of a mini-batch, and the least speedup.
NAMED = {
    "torchvision/vit_b_16": (64, 1.05),
    "torchvision/convnext_tiny": (64, 1.25),
    "torchvision/efficientnet_b0": (128, 1.25),
    "torchvision/mobilenet_v3_large": (128, 1.25),
}
ASKED = {"median_speedup": 1.3, "least_speedup": 1.0, "median_memory_ratio": 0.75}  # of the drawn networks
# of the drawn networks by `mbc.module`
ASKED_OF_MODULES = {"median_module_speedup": 1.25, "least_module_speedup": 0.97}
OURS = ("mbc", "module")  # `mbc.from_torch` and `mbc.module`
BLOCKS, BLOCK_S = 7, 0.3  # of steps that are timed together
REHEARSED_BLOCKS = 2  # of one step each
COLUMNS = (
    "name", "batch", *(f"{mode}_ms" for mode in MODES), "mbc_ms", "speedup", "module_ms", "module_speedup",
    "module_share", "call_us", "memory_ratio", "first_step_s", "loss_error", "torch_loss_error",
)  # fmt: skip


def run_contender(request: Request, limit_s: float) -> dict[str, Any]:
    """Run a contender in a process of its own, and return its figures or the reason of its failure."""
    return in_own_process(Path(__file__).with_name("from_torch_contenders.py"), request, limit_s)


def run_torch(requests: Sequence[Request], limit_s: float) -> list[dict[str, dict[str, Any]]]:
    """Run PyTorch's contenders of some networks side by side until they are ready, then time them one after another."""
    turns = [(request, mode) for request in requests for mode in MODES]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(turns)) as pool:
        waiting: list[tuple[Path, Future[dict[str, Any]]]] = []
        for number, (request, mode) in enumerate(turns):
            turn = Path(folder, str(number // len(MODES)))
            turn.mkdir(exist_ok=True)
            asked = replace(request, contender=mode, turn=str(turn))
            waiting.append((turn / mode, pool.submit(run_contender, asked, limit_s)))
        while not all(file.with_suffix(".ready").exists() or future.done() for file, future in waiting):
            time.sleep(POLL_S)
        runs: list[dict[str, dict[str, Any]]] = [{} for _ in requests]
        for number, (file, future) in enumerate(waiting):
            file.with_suffix(".turn").touch()
            runs[number // len(MODES)][file.name] = future.result()
        return runs


def row_of(
    request: Request, peers: Mapping[str, dict[str, Any]], ours: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Return the row of one network of which PyTorch's contenders have run."""
    return judged({**peers, **{name: run_contender(replace(request, contender=name), limit_s) for name in ours}})


def judged(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the row that follows from the contenders' figures.

    The row has failed if mbc failed or all of PyTorch's contenders did. Without `from_torch` it has the figures of
    `mbc.module` alone.
    """
    peers = {name: runs[name] for name in MODES if "failed" not in runs[name]}
    mine, module = (runs.get(name, {"failed": "not run"}) for name in OURS)
    row: dict[str, Any] = {f"{name}_ms": peer["ms"] for name, peer in peers.items()}
    if "failed" in runs.get("mbc", module) or not peers:
        failed = "; ".join(f"{name}: {run['failed']}" for name, run in runs.items() if "failed" in run)
        return {**row, "failed": failed, "found": dict(runs)}
    best = min(peers, key=lambda name: peers[name]["ms"])
    row["best"] = best
    if "failed" not in module:
        row |= {"module_ms": module["ms"], "module_speedup": peers[best]["ms"] / module["ms"]}
        row["call_us"] = module["call_us"]
    if "failed" in mine:
        return {**row, "found": dict(runs)}
    row |= {"mbc_ms": mine["ms"], "speedup": peers[best]["ms"] / mine["ms"], "first_step_s": mine["first_step_s"]}
    if "failed" not in module:
        row["module_share"] = mine["ms"] / module["ms"]
    if mine["ms"] <= peers[best]["ms"]:
        row["memory_ratio"] = mine["taken_bytes"] / max(1, peers[best]["reserved_bytes"])
    if "eager" in peers and not mine["drops"]:
        losses = peers["eager"]["losses"]
        others = [distance(peer["losses"], losses) for name, peer in peers.items() if name != "eager"]
        row["loss_error"] = distance(mine["losses"], losses)
        row |= {"torch_loss_error": max(others)} if others else {}
    return {**row, "found": dict(runs)}


def distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of losses from those of a reference."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, reference, strict=True))


def modules_together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of `mbc.module` for the drawn networks that have been run.

    Whether they reach what was asked for is among them only if all drawn networks have been run.
    """
    speedups = [row["module_speedup"] for row in rows if "module_speedup" in row]
    if not speedups:
        return {}
    figures = {"median_module_speedup": statistics.median(speedups), "least_module_speedup": min(speedups)}
    reached = {name: value >= ASKED_OF_MODULES[name] for name, value in figures.items()}
    complete = {"reached": reached} if len(speedups) == len(DRAWN) else {}
    return {**figures, "networks": len(speedups), "asked": ASKED_OF_MODULES, **complete}


def together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures that hold for all drawn networks together; none until every row exists."""
    speedups = [row["speedup"] for row in rows if "speedup" in row]
    ratios = [row["memory_ratio"] for row in rows if "memory_ratio" in row]
    if not speedups or len(speedups) < len(rows):
        return {}
    figures = {"median_speedup": statistics.median(speedups), "least_speedup": min(speedups)}
    reached = {name: value >= ASKED[name] for name, value in figures.items()}
    if len(ratios) == len(rows):
        figures["median_memory_ratio"] = statistics.median(ratios)
        reached["median_memory_ratio"] = figures["median_memory_ratio"] <= ASKED["median_memory_ratio"]
    return {**figures, "asked": ASKED, "reached": reached}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names with their family, such as timm/hgnet_small")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin no row later")
    parser.add_argument("--measure-for", help="passed on to from_torch, such as 90s (default: until all is measured)")
    parser.add_argument("--limit", type=float, default=400, help="seconds that one contender may take (default 400)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, help="of all networks (default: as listed in this file)")
    parser.add_argument("--size", type=int, default=SIZE, help=f"pixels (default {SIZE})")
    parser.add_argument("--ahead", type=int, default=1, help="networks that PyTorch compiles side by side (default 1)")
    parser.add_argument("--ours", nargs="+", default=OURS, choices=OURS, help="contenders of mbc (default: both)")
    parser.add_argument("--again", action="store_true", help="run also the rows that are there")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    began, on_gpu = time.monotonic(), arguments.device == "cuda"
    batches = DRAWN | {name: rows for name, (rows, _) in NAMED.items()}
    names = arguments.only.split(",") if arguments.only else list(batches)
    if on_gpu:
        need_gpu("--device cpu shows without one that everything works")
    family = "from_torch" if "mbc" in arguments.ours else "module"
    kept = results(f"{family}_{arguments.device}", again=arguments.again, size=arguments.size)
    blocks, block_s = (BLOCKS, BLOCK_S) if on_gpu else (REHEARSED_BLOCKS, 0.0)
    requests = {
        name: Request(
            "", name, arguments.batch or batches.get(name, 64), arguments.size, arguments.device, blocks, block_s,
            arguments.measure_for,
        )
        for name in names if not kept.done(name)
    }  # fmt: skip
    missing, gpu = list(requests), environment()["gpu"]
    for first in range(0, len(missing), arguments.ahead):
        if time.monotonic() - began > arguments.seconds:
            break
        group = missing[first : first + arguments.ahead]
        for name, peers in zip(group, run_torch([requests[n] for n in group], arguments.limit), strict=True):
            request = requests[name]
            row = attempt(partial(row_of, request, peers, arguments.ours, arguments.limit), name)
            row |= {"batch": request.batch, "gpu": gpu}
            if name in NAMED and "speedup" in row:
                row |= {"asked": NAMED[name][1], "passed": row["speedup"] >= NAMED[name][1]}
            kept.put(row)
            show([kept.rows[name]], COLUMNS)
    drawn = [kept.rows[name] for name in DRAWN if name in kept.rows]
    if family == "module":
        kept.more |= modules_together(drawn)
    elif len(drawn) == len(DRAWN):
        kept.more |= together(drawn)
    kept.arrange(names)
    show(list(kept.rows.values()), COLUMNS)
    print({name: kept.more[name] for name in (*ASKED, *ASKED_OF_MODULES, "reached") if name in kept.more})


if __name__ == "__main__":
    start(main)
