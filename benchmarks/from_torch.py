"""Networks that mbc was never tuned for, trained through `mbc.from_torch` and by PyTorch, in one run.

Fifteen networks of timm, drawn by a seed (`from_torch_draw.py`), and four of torchvision, each in bf16 at 224 pixels:
PyTorch's plain loop, `torch.compile`, `torch.compile` with CUDA graphs, and `mbc.from_torch`, each in a process of its
own with a limit of time. PyTorch's three compile side by side, and are timed in turn. `--build-first`: mbc's kernels
are compiled before the first row, as after any earlier use of mbc on that machine. `--no-memory`: no smaller plan of
mbc is looked for, so that rows have no `share` and no `known_s`; another call takes them as done, unless `--again`.

`ms` are those of a step; `speedup` is over the fastest of PyTorch's. `memory_ratio`: what mbc takes of the
GPU, with all of it to take from, over what PyTorch's allocator had reserved for that fastest one; not where mbc's step
is slower. `least_memory_ratio`: the same of the smallest plan that was found to be no slower, whose budget is a `share`
of those reserved bytes. `first_step_s`: from `from_torch` to the first loss; `known_s`: the same of the second plan,
when a profile knows all kernels.
`loss_error`: the largest relative distance of the first five losses from those of PyTorch's plain loop, and
`torch_loss_error` that of its compiled ones; what draws random numbers has none.

    python benchmarks/from_torch.py [--only NAME,NAME] [--for SECONDS] [--measure-for 90s] [--fresh-profile]
                                    [--build-first] [--no-memory]
    python benchmarks/from_torch.py --plan-only [--only NAME,NAME] [--for SECONDS] [--gpu h100]
    python benchmarks/from_torch.py --draw
    python benchmarks/from_torch.py --steps50 [--device cpu]
    python benchmarks/from_torch.py --device cpu --only torchvision/squeezenet1_1 --batch 2 --size 64

Rows are written one by one; another call goes on with those that are missing or failed. `--for`: begins no row later.
On a CPU nothing is timed that says anything: that rehearses the run. `--plan-only` plans each without a GPU, and says
how its prediction compares with what such a GPU took; `--steps50` is `from_torch_steps.py`; `--draw` repeats the draw,
where its results are not there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from from_torch_contenders import MODES, POLL_S, SIZE, Asked
from from_torch_draw import draw, drawn
from from_torch_plans import PLAN_COLUMNS, measured_on, planned
from from_torch_steps import run as fifty_steps
from record import Results, attempt, build_kernels, need_gpu, results, show, start

# Those whose speed was asked for by name: the rows of a mini-batch, and over PyTorch's fastest.
NAMED = {
    "torchvision/vit_b_16": (64, 1.05),
    "torchvision/convnext_tiny": (64, 1.25),
    "torchvision/efficientnet_b0": (128, 1.25),
    "torchvision/mobilenet_v3_large": (128, 1.25),
}
ASKED = {"median_speedup": 1.3, "least_speedup": 1.0, "median_memory_ratio": 0.75}  # of the drawn ones
BLOCKS, BLOCK_S = 7, 0.3  # of steps that are timed together
REHEARSED_BLOCKS = 2  # of one step each
COLUMNS = (
    "name", "batch", *(f"{mode}_ms" for mode in MODES), "mbc_ms", "speedup", "memory_ratio", "least_memory_ratio",
    "first_step_s", "known_s", "loss_error", "torch_loss_error",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """How the contenders of this run are started. `limit_s`: the most that one may take."""

    limit_s: float
    fresh_profile: bool
    memory: bool = True

    def contender(self, asked: Asked, profiles: str) -> dict[str, Any]:
        """What one found, or why it did not."""
        environment = {**os.environ, **({"XDG_DATA_HOME": profiles} if self.fresh_profile else {})}
        command = [sys.executable, str(Path(__file__).with_name("from_torch_contenders.py"))]
        with (
            tempfile.TemporaryFile("w+") as told,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as said,
        ):
            told.write(json.dumps(asdict(asked)))
            told.seek(0)
            process = subprocess.Popen(
                command, stdin=told, stdout=out, stderr=said, env=environment, start_new_session=True
            )
            until_s, waits = time.monotonic() + self.limit_s, bool(asked.turn)
            while process.poll() is None:
                if waits and Path(asked.turn, f"{asked.contender}.ready").exists():
                    # It may wait for others as long as these may take, and is then timed.
                    until_s, waits = time.monotonic() + 2 * self.limit_s, False
                if time.monotonic() > until_s:
                    os.killpg(process.pid, signal.SIGKILL)  # with those that look for plans for it
                    process.wait()
                    return {"failed": f"it took more than {self.limit_s:.0f} s"}
                time.sleep(POLL_S)
            out.seek(0)
            said.seek(0)
            if process.returncode:
                last = said.read().strip().splitlines()[-8:]
                return {"failed": "\n".join(last) or f"exit code {process.returncode}"}
            return json.loads(out.read().strip().splitlines()[-1])

    def of_torch(self, asked: Asked, profiles: str) -> dict[str, dict[str, Any]]:
        """PyTorch's contenders: side by side until they are ready, which is work of the host, and timed in turn."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(MODES)) as pool:
            waiting = {
                name: pool.submit(self.contender, replace(asked, contender=name, turn=folder), profiles)
                for name in MODES
            }
            while not all(Path(folder, f"{name}.ready").exists() or waiting[name].done() for name in MODES):
                time.sleep(POLL_S)
            for name in MODES:
                Path(folder, f"{name}.turn").touch()
                waiting[name].result()
            return {name: one.result() for name, one in waiting.items()}

    def row(self, asked: Asked) -> dict[str, Any]:
        """All contenders of one network, and what follows from them."""
        with tempfile.TemporaryDirectory() as profiles:
            if asked.device == "cuda":
                found = self.of_torch(asked, profiles)
            else:
                found = {name: self.contender(replace(asked, contender=name), profiles) for name in MODES}
            mine = found["mbc"] = self.contender(replace(asked, contender="mbc"), profiles)
            peers = [found[name] for name in MODES if "failed" not in found[name]]
            if "failed" not in mine and peers and asked.device == "cuda":
                best = min(peers, key=lambda peer: peer["ms"])
                if self.memory and mine["ms"] <= best["ms"]:  # with less memory it is no faster
                    at_speed = replace(
                        asked, contender="mbc_at_speed", source=mine["source"], memory_bytes=best["reserved_bytes"],
                        step_ms=best["ms"], took_ms=mine["ms"], predicted_ms=mine["predicted_ms"],
                    )  # fmt: skip
                    found["mbc_at_speed"] = self.contender(at_speed, profiles)
        return judged({name: {k: v for k, v in one.items() if k != "source"} for name, one in found.items()})


def judged(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The row of what the contenders found; it failed without mbc, or without any of PyTorch's."""
    peers = {name: found[name] for name in MODES if "failed" not in found[name]}
    mine, at_speed = found["mbc"], found.get("mbc_at_speed", {})
    row: dict[str, Any] = {f"{name}_ms": peer["ms"] for name, peer in peers.items()}
    if "failed" in mine or not peers:
        failed = {name: one["failed"] for name, one in found.items() if "failed" in one}
        return {**row, "failed": "; ".join(f"{name}: {text}" for name, text in failed.items()), "found": dict(found)}
    best = min(peers, key=lambda name: peers[name]["ms"])
    row |= {"mbc_ms": mine["ms"], "best": best, "speedup": peers[best]["ms"] / mine["ms"]}
    row |= {"first_step_s": mine["first_step_s"]}
    if mine["ms"] <= peers[best]["ms"]:
        row["memory_ratio"] = mine["taken_bytes"] / peers[best]["reserved_bytes"]
    if "share" in at_speed:
        row["least_memory_ratio"] = at_speed["taken_bytes"] / peers[best]["reserved_bytes"]
        row |= {"share": at_speed["share"], "known_s": at_speed["first_step_s"]}
    if "eager" in peers and not mine["drops"]:
        losses = peers["eager"]["losses"]
        others = [distance(peer["losses"], losses) for name, peer in peers.items() if name != "eager"]
        row["loss_error"] = distance(mine["losses"], losses)
        row |= {"torch_loss_error": max(others)} if others else {}
    return {**row, "found": dict(found)}


def distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative one."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, reference, strict=True))


def together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that were asked of the drawn networks, and whether they are reached; nothing before all are there."""
    speedups = [row["speedup"] for row in rows if "speedup" in row]
    ratios = [row["memory_ratio"] for row in rows if "memory_ratio" in row]
    if not speedups or len(speedups) < len(rows):
        return {}
    found = {"median_speedup": statistics.median(speedups), "least_speedup": min(speedups)}
    reached = {name: found[name] >= ASKED[name] for name in found}
    if len(ratios) == len(rows):
        found["median_memory_ratio"] = statistics.median(ratios)
        reached["median_memory_ratio"] = found["median_memory_ratio"] <= ASKED["median_memory_ratio"]
    return {**found, "asked": ASKED, "reached": reached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names with their family, such as timm/resnest26d")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin no row later")
    parser.add_argument("--measure-for", help="passed on to from_torch, such as 90s (default: until all is measured)")
    parser.add_argument("--fresh-profile", action="store_true", help="each network on a GPU that mbc has never seen")
    parser.add_argument("--build-first", action="store_true", help="compile mbc's kernels before the first row")
    parser.add_argument("--no-memory", action="store_true", help="look for no plans at PyTorch's speed")
    parser.add_argument("--limit", type=float, default=400, help="seconds that one contender may take (default 400)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, help="of all (default: as drawn)")
    parser.add_argument("--size", type=int, default=SIZE, help=f"pixels (default {SIZE})")
    parser.add_argument("--again", action="store_true", help="take none of the rows that are there")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--gpu", default="h200", help="to plan for by --plan-only (default h200)")
    parser.add_argument("--steps50", action="store_true", help="fifty steps in fp32 beside PyTorch's")
    parser.add_argument("--draw", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    began = time.monotonic()
    if arguments.draw:
        print(f"drawn: {', '.join(drawn(draw()))}")
        return
    if arguments.steps50:
        fifty_steps(arguments.device, arguments.only.split(",") if arguments.only else (), arguments.again)
        return
    batches = drawn() | {name: rows for name, (rows, _) in NAMED.items()}
    names = arguments.only.split(",") if arguments.only else list(batches)
    on_gpu = arguments.device == "cuda"
    if on_gpu and not arguments.plan_only:
        need_gpu("rehearse by --device cpu, or plan by --plan-only")
    kind = arguments.device
    if arguments.plan_only:
        kind = "planned" if arguments.gpu == "h200" else f"planned_{arguments.gpu}"
    kept = results(f"from_torch_{kind}", again=arguments.again, size=arguments.size)
    there = measured_on(arguments.gpu) if arguments.plan_only else {}
    run = Run(arguments.limit, arguments.fresh_profile, not arguments.no_memory)
    networks = {
        name: Asked(
            contender="",
            model=name,
            batch=arguments.batch or batches.get(name, 64),
            size=arguments.size,
            device=arguments.device,
            blocks=BLOCKS if on_gpu else REHEARSED_BLOCKS,
            block_s=BLOCK_S if on_gpu else 0.0,
            measure_for=arguments.measure_for,
        )
        for name in names
        if not kept.done(name)
    }

    def row_of(asked: Asked) -> dict[str, Any]:
        return planned(asked, arguments.gpu, there.get(asked.model, {})) if arguments.plan_only else run.row(asked)

    if arguments.build_first and on_gpu and networks:
        build_kernels("bf16")
    for name, asked in networks.items():
        if time.monotonic() - began > arguments.seconds:
            break
        row = attempt(partial(row_of, asked), name) | {"batch": asked.batch}
        if name in NAMED and "speedup" in row:
            row |= {"asked": NAMED[name][1], "passed": row["speedup"] >= NAMED[name][1]}
        kept.put(row)
        show([kept.rows[name]], PLAN_COLUMNS if arguments.plan_only else COLUMNS)
    finish(kept, names, arguments.plan_only)


def finish(kept: Results, names: Sequence[str], plan_only: bool) -> None:
    """The table of all rows; with it, where networks were timed, the figures of those that were drawn."""
    if not plan_only:
        wanted = list(drawn())
        rows = [kept.rows[name] for name in wanted if name in kept.rows]
        kept.more |= together(rows) if rows and len(rows) == len(wanted) else {}
    kept.arrange(names)
    show(list(kept.rows.values()), PLAN_COLUMNS if plan_only else COLUMNS)
    print({name: kept.more[name] for name in (*ASKED, "reached") if name in kept.more})


if __name__ == "__main__":
    start(main)
