"""The device on which `mbc check` runs plans, and the packages that it builds for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mbc.cli.subject import build_package
from mbc.errors import MbcError
from mbc.hardware.target import local_gpus

if TYPE_CHECKING:
    from mbc.plan.model import Plan


def on_gpu(device: str, plan: Plan) -> bool:
    """Return whether to compare on a GPU; raise MBC199 if --device cuda asks for one and none can run it."""
    here = bool(local_gpus())
    if device == "cuda" and not plan.is_timed:
        raise MbcError(
            "MBC199", f"{plan.graph.precision} runs on the CPU only", "use --device cpu, or another train.precision"
        )
    if device == "cuda" and not here:
        raise MbcError("MBC199", "there is no GPU here to compare on", "use --device cpu; mbc doctor says more")
    return here and device != "cpu" and (device == "cuda" or plan.is_timed)


def built(plan: Plan, folder: Path) -> Path:
    """Build the package of a plan with its library; raise MBC199 if that is not possible."""
    package = build_package(plan, folder, overwrite=False)
    if package.library is None:
        missing = package.missing[0].name if package.missing else "a part of the toolkit"
        remedy = "use --device cpu, or install it (mbc doctor says how)"
        raise MbcError("MBC199", f"the step cannot be built for the GPU: {missing} is missing", remedy)
    return package.folder
