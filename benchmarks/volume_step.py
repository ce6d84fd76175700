"""Training steps of nnU-Net's networks for volumes, by mbc without a limit and within budgets, and by PyTorch.

    python benchmarks/volume_step.py [--only WORD ...] [--precision fp16] [--for SECONDS] [--measure-for 120] [--again]
    python benchmarks/volume_step.py --device cpu --only plain --set "patch=(16, 16, 16)" --set "features=(4, 4, 8)"

Each row is a process of its own with a limit of time (`volume_contender.py`): PyTorch eager and compiled with channels
first and last, mbc's plans, the gradients of one fp32 step beside those of PyTorch in fp32 and float64, and the
convolutions of plans within limits of workspace from 64 MiB to 8 GiB, undivided and divided (measured once
into the profile, then planned from it). Rows are written one by one; another call continues with those that
are missing or failed. `--only` chooses rows whose name holds all of its words; rows of one network belong together,
since `networks` in the result compares them:

* `speedup`: the fastest of PyTorch's steps over mbc's. `memory_ratio`: memory of mbc's process over that step's.
* `overhead`: mbc's step within a budget over that without a limit, less 1.
* `gradient_ratio`: median error of mbc's gradients over that of PyTorch's.

On a CPU the figures mean nothing; such a run only shows that everything works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from own_process import in_own_process
from record import ROOT, attempt, need_gpu, results, show, start
from volume_contender import Request

FOLDER, SCRIPT = ROOT / "build" / "volume_step", Path(__file__).with_name("volume_contender.py")
SMALL = ("patch=(64, 64, 64)",)  # for gradients: PyTorch has no fast convolutions of volumes in float64
TORCH = tuple(f"{mode} {layout}" for mode in ("eager", "compile") for layout in ("first", "last"))
WORKSPACES = tuple(f"{64 << i}MiB" for i in reversed(range(8)))  # the first row measures
COLUMNS = (
    "name", "ms", "spread_ms", "predicted_ms", "taken_bytes", "arena_bytes", "undivided_ms", "all_ms", "ratio",
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """An example with settings as NAME=VALUE, budgets of its plans, and what is asked of it, by figure.

    A network of which no speedup is asked only has to train within its budgets.
    """

    example: str
    settings: tuple[str, ...]
    budgets: tuple[str, ...]
    asked: Mapping[str, float]


FLAT, CUBE = "(1, 3, 3)", "(3, 3, 3)"
ANISOTROPIC = (
    "patch=(28, 256, 256)", f"kernels=({FLAT}, {FLAT}, {CUBE}, {CUBE}, {CUBE}, {CUBE})",
    "strides=((1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2))",
)  # fmt: skip
PLAIN_ASKED = {"speedup": 1.45, "memory_ratio": 0.65, "overhead in 3.4GB": 0.05, "overhead in 2.9GB": 0.15}
NETWORKS = {
    "plain": Network("nnunet", (), ("3.4GB", "2.9GB", "2.4GB"), PLAIN_ASKED | {"gradient_ratio": 1.2}),
    "batch7": Network("nnunet", ("batch=7",), ("100GB",), {}),
    "resenc": Network("nnunet_resenc", (), ("8.5GB", "6GB"), {"speedup in 8.5GB": 1.4}),
    "anisotropic": Network("nnunet", ANISOTROPIC, (), {"speedup": 1.2}),
    "large": Network("nnunet", ("batch=1", "patch=(256, 448, 448)"), ("40GB",), {}),
}


def requests(arguments: argparse.Namespace) -> dict[str, Request]:
    """Return the rows that are asked for, by name."""
    rows: dict[str, Request] = {}
    for name, network in NETWORKS.items():
        ways = [(contender, "") for contender in TORCH if network.asked]
        ways += [(f"mbc {arguments.precision}", memory) for memory in ("", *network.budgets) if memory or network.asked]
        if name == "plain":
            ways += [("gradients", ""), *((f"workspace {arguments.precision}", limit) for limit in WORKSPACES)]
        for contender, memory in ways:
            row = f"{name} {contender}" + f" in {memory}" * bool(memory)
            settings = *network.settings, *SMALL * (contender == "gradients"), *arguments.set
            rows[row] = Request(
                contender, network.example, settings, arguments.device,
                arguments.measure_for, memory, str(FOLDER / row.replace(" ", "_")),
            )  # fmt: skip
    return {row: request for row, request in rows.items() if all(word in row for word in arguments.only)}


def compared(name: str, rows: Mapping[str, Mapping[str, Any]], precision: str) -> dict[str, Any]:
    """Return the figures that follow from the rows of a network, as far as these are there."""
    mine = {row.removeprefix(f"{name} "): fields for row, fields in rows.items() if row.startswith(f"{name} ")}
    peers = [mine[contender] for contender in TORCH if "ms" in mine.get(contender, ())]
    best, label = min(peers, key=lambda peer: peer["ms"], default={}), f"mbc {precision}"
    figures = {"gradient_ratio": mine.get("gradients", {}).get("ratio")}
    for row, plan in mine.items():
        if row.startswith(label):
            within = row.removeprefix(label)
            figures[f"speedup{within}"] = _ratio(best, plan, "ms")
            figures[f"memory_ratio{within}"] = _ratio(plan, best, "taken_bytes")
            figures[f"overhead{within}"] = within and _ratio(plan, mine.get(label, {}), "ms", less=1)
    return {figure: value for figure, value in figures.items() if value}


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any], field: str, less: float = 0) -> float | None:
    """Return the ratio of a field of two rows, or None if one lacks it."""
    return one[field] / other[field] - less if one.get(field) and other.get(field) else None


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="rows whose name holds all of these")
    parser.add_argument("--precision", default="fp16", help="of mbc; PyTorch computes in fp16 (default fp16)")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin no row later")
    parser.add_argument("--limit", type=float, default=500, help="seconds that a row may take (default 500)")
    parser.add_argument("--measure-for", type=float, default=120, help="seconds, for each of mbc's plans (default 120)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of all networks")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--again", action="store_true", help="run also the rows that are there")
    arguments = parser.parse_args(words)
    if arguments.device == "cuda":
        need_gpu("--device cpu shows without one that everything works")
    kept = results(f"volume_step_{arguments.device}", again=arguments.again, settings=arguments.set)
    began = time.monotonic()
    for name, request in requests(arguments).items():
        if kept.done(name):
            continue
        if time.monotonic() - began > arguments.seconds:
            break
        row = attempt(partial(in_own_process, SCRIPT, request, arguments.limit), name)
        rows = {**kept.rows, name: row}
        kept.more["networks"] = {
            network: {"asked": dict(NETWORKS[network].asked), **compared(network, rows, arguments.precision)}
            for network in NETWORKS
        }
        kept.put(row)
        show([row], COLUMNS)
    show(list(kept.rows.values()), COLUMNS)
    print(kept.more.get("networks"))


if __name__ == "__main__":
    start(main)
