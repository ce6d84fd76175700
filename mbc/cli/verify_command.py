"""The command `mbc verify`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbc.cli.subject import plan_file, read_plan
from mbc.cli.terminal import notes
from mbc.errors import MbcError
from mbc.plan.file import PLAN_FILE
from mbc.progress import busy
from mbc.units import show_size

if TYPE_CHECKING:
    from mbc.plan.model import Plan
    from mbc.plan.verify import Verified


def run(arguments: argparse.Namespace) -> int:
    """Read a plan strictly, run it symbolically, compile its source again, and print what was proved."""
    from mbc.plan.verify_source import verify_source

    file = plan_file(arguments.plan)
    if file is None:
        raise MbcError(
            "MBC185", f"'{arguments.plan}' is neither a plan (.json) nor a package",
            "a source is verified whenever it is compiled: give what mbc compile wrote",
        )  # fmt: skip
    package = Path(arguments.plan).is_dir()
    files = [file, *(sorted(file.parent.glob(f"rank*/{PLAN_FILE}")) if package else ())]
    plans = [read_plan(each) for each in files]
    results = [_verified(each, plan, arguments.profile) for each, plan in zip(files, plans, strict=True)]
    of_source = [verify_source(plan) for plan in plans]
    ranks = plans[0].graph.ranks
    together = ranks is not None and (len(ranks.members) == ranks.size or (package and 0 in ranks.members))
    if together:
        from mbc.plan.verify_ranks import verify_ranks

        verify_ranks(plans)
    if arguments.json:
        each_figures = zip(files, results, of_source, strict=True)
        first, *others = (_figures(each, verified, has_source) for each, verified, has_source in each_figures)
        shared = {} if ranks is None else {"ranks": ranks.size, "together": together, "other_plans": others}
        print(json.dumps(first | shared, indent=2))
        return 0
    for each, verified, has_source in zip(files, results, of_source, strict=True):
        _print(each, verified, has_source)
    if together and ranks is not None:
        print(f"{ranks.size} ranks sum the same in one order, and each row of the mini-batch counts once")
    elif ranks is not None:
        print(f"it is of {ranks.size} ranks, some of which run another plan: give the package to verify them together")
    return 0


def _verified(file: Path, plan: Plan, profile: str | None) -> Verified:
    from mbc.plan.verify import verify_plan
    from mbc.profile.locate import find_profile
    from mbc.profile.measured_workspace import measured_workspace

    with notes(), busy(f"verifying {file}"):
        measured = find_profile(plan.target.device, profile)
        return verify_plan(plan, measured_workspace(measured))


def _figures(file: Path, verified: Verified, has_source: bool) -> dict[str, Any]:
    return {
        "plan": str(file),
        "source_verified": has_source,
        "train_launches": verified.train_launches,
        "infer_launches": verified.infer_launches,
        "buffers": verified.buffers,
        "arena_bytes": verified.arena_bytes,
        "live_bytes": verified.live_bytes,
        "unproved": dict(verified.unproved),
        "peak_bytes": {program: dict(kinds) for program, kinds in verified.peak_bytes.items()},
    }


def _print(file: Path, verified: Verified, has_source: bool) -> None:
    print(
        f"{file} computes what its graph says: {verified.train_launches} launches of a step, {verified.infer_launches} "
        f"of inference, {verified.buffers} buffers in an arena of {show_size(verified.arena_bytes)} "
        f"({show_size(verified.live_bytes)} of peak live bytes)"
    )
    said = "gives this graph" if has_source else "is not in the plan: nothing says which network its graph is of"
    print(f"  its source {said}")
    for program, kinds in verified.peak_bytes.items():
        parts = ", ".join(f"{kind} {show_size(size)}" for kind, size in kinds.items() if size)
        print(f"  peak of {program}: {parts}")
    if verified.unproved:
        launches = ", ".join(f"{count} of {provider}'s" for provider, count in verified.unproved.items())
        print(
            f"  left to the GPU: that the library has the kernels of {launches} launches, and that their workspace is "
            "enough for them (no profile has measured them so; checked when the module is loaded)"
        )
