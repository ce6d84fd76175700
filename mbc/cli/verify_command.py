"""`mbc verify`"""

from __future__ import annotations

import argparse
import json

from mbc.cli.places import plan_file, read_plan
from mbc.cli.terminal import busy, notes
from mbc.errors import MbcError
from mbc.units import show_size


def run(arguments: argparse.Namespace) -> int:
    """Read a plan strictly, run it symbolically, say what was proved."""
    file = plan_file(arguments.plan)
    if file is None:
        raise MbcError(
            "MBC185", f"'{arguments.plan}' is neither a plan (.json) nor a package",
            "a source is verified whenever it is compiled: give what mbc compile wrote",
        )  # fmt: skip
    plan = read_plan(file)
    from mbc.hardware.spec import spec_like
    from mbc.plan.verify import verify_plan
    from mbc.profile.locate import find_profile
    from mbc.profile.measured_workspace import measured_workspace

    with notes(), busy(f"verifying {file}"):
        profile = find_profile(spec_like(plan.target.gpu, plan.target.architecture), arguments.profile)
        verified = verify_plan(plan, measured_workspace(profile))
    figures = {
        "plan": str(file),
        "train_launches": verified.train_launches,
        "infer_launches": verified.infer_launches,
        "buffers": verified.buffers,
        "arena_bytes": verified.arena_bytes,
        "live_bytes": verified.live_bytes,
        "unproved": dict(verified.unproved),
        "peak_bytes": {program: dict(kinds) for program, kinds in verified.peak_bytes.items()},
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return 0
    print(
        f"{file} computes what its graph says: {verified.train_launches} launches of a step, {verified.infer_launches} "
        f"of inference, {verified.buffers} buffers in an arena of {show_size(verified.arena_bytes)} "
        f"({show_size(verified.live_bytes)} of peak live bytes)"
    )
    for program, kinds in verified.peak_bytes.items():
        parts = ", ".join(f"{kind} {show_size(size)}" for kind, size in kinds.items() if size)
        print(f"  peak of {program}: {parts}")
    if verified.unproved:
        launches = ", ".join(f"{count} of {provider}'s" for provider, count in verified.unproved.items())
        print(
            f"  left to the GPU: that the library has the kernels of {launches} launches, and that their workspace is "
            "enough for them (no profile has measured them so; checked when the module is loaded)"
        )
    return 0
