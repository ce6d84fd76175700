"""The device on which `mbc check` runs plans, and the packages that it builds for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mbc.cli.subject import build_package
from mbc.errors import MbcError
from mbc.hardware.target import local_gpus
from mbc.ir.types import Precision

if TYPE_CHECKING:
    from mbc.plan.model import Plan


def on_gpu(device: str, plan: Plan) -> bool:
    """Whether to compare on a GPU; MBC199 where there is none and one is asked for."""
    here = bool(local_gpus())
    if device == "cuda" and not here:
        raise MbcError("MBC199", "there is no GPU here to compare on", "use --device cpu; mbc doctor says more")
    return here and device != "cpu" and (device == "cuda" or plan.graph.precision is not Precision.FP64)


def built(plan: Plan, folder: Path) -> Path:
    """The package of a plan with its library; MBC199 where it cannot be built."""
    package = build_package(plan, folder, overwrite=False)
    if package.library is None:
        missing = package.missing[0] if package.missing else "a part of the toolkit"
        raise MbcError("MBC199", f"the step cannot be built for the GPU, for want of {missing}", "or use --device cpu")
    return package.folder
