"""Opens a module: reads its plan, and opens the machine that runs it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from mbc.errors import MbcError
from mbc.files import read_text
from mbc.plan.file import MOST_BYTES, PLAN_FILE, load_plan
from mbc.plan.model import Plan
from mbc.plan.verify_ranks import shared_digest
from mbc.runtime.arguments import choice, flag, path_of, shown
from mbc.runtime.bindings import Places
from mbc.runtime.checkpoint import why
from mbc.runtime.host import Host
from mbc.runtime.launch_order import Transfers
from mbc.runtime.machine import Allocation, Machine
from mbc.runtime.membership import Membership, check_membership
from mbc.version import PACKAGE, __version__

DEVICES = ("auto", "cuda", "cpu")

# Errors for which `device="auto"` takes the CPU: no PyCUDA, no GPU, no library built, a precision for the CPU only.
_NO_CUDA = frozenset(("MBC152", "MBC153", "MBC157", "MBC168"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings with which a module is opened; `Module.__init__` in `mbc/runtime/module.py` describes each of them."""

    seed: int
    device: str
    canaries: bool
    eager: bool
    prefetch: bool
    shadow: bool
    transfers: Transfers | str
    membership: Membership | None = None
    listener: int | None = None
    allocate: Callable[[int], Allocation] | None = None
    arena: Any = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            MbcError: MBC167 for a setting that is not allowed.
        """
        if not isinstance(cast(object, self.seed), int | np.integer):
            raise MbcError(
                "MBC167", f"the seed {shown(self.seed)} is not a whole number", "choose one from 0 to 2^63 - 1"
            )
        if not 0 <= self.seed < 1 << 63:
            raise MbcError("MBC167", f"the seed {shown(self.seed)} is not in [0, 2^63)", "choose another one")
        choice("device", self.device, DEVICES)
        choice("transfers", self.transfers, tuple(Transfers))
        for name in ("canaries", "eager", "prefetch", "shadow"):
            flag(name, getattr(self, name))


def open_plan(
    subject: str | Path | Plan, given: Membership | None = None
) -> tuple[Plan, Path | None, Membership | None]:
    """Return the plan, the folder of its library, and the ranks that share its mini-batches.

    Args:
        subject: A folder of a package, a plan file, or a plan.
        given: The ranks; None for those with which this process was started.

    Raises:
        MbcError: MBC166 if there is no plan, MBC281 if the plan is for another number of ranks, and the errors of
            `load_plan`.
    """
    plan, folder = _read(subject)
    members = check_membership(plan.graph, given)
    if members is None:
        return plan, folder, None
    plan, folder = _of_rank(members.rank, plan, folder)
    members.agree({"mbc": __version__, "plan": shared_digest(plan)})
    return plan, folder, members


def _of_rank(rank: int, plan: Plan, folder: Path | None) -> tuple[Plan, Path | None]:
    """Return `plan` if it is for this rank, otherwise the plan for this rank from a subfolder of the package.

    Raises:
        MbcError: MBC281 if the package has no plan for this rank.
    """
    ranks = plan.graph.ranks
    if ranks is None or rank in ranks.members:
        return plan, folder
    for inside in () if folder is None else sorted(folder.glob("rank*")):
        other, place = _read(inside)
        if other.graph.ranks is not None and rank in other.graph.ranks.members:
            return other, place
    raise MbcError(
        "MBC281", f"the plan is for the ranks {list(ranks.members)}, but this is rank {rank}", "compile again"
    )


def _read(subject: str | Path | Plan) -> tuple[Plan, Path | None]:
    if isinstance(subject, Plan):
        return subject, None

    path = path_of(subject, "MBC166", "cannot read the plan")
    try:
        path = path / PLAN_FILE if path.is_dir() else path
        text = read_text(path, MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise MbcError(
            "MBC166", f"cannot read the plan '{path}': {why(error)}", "give the folder that `mbc compile` wrote"
        ) from error
    return load_plan(text, str(path)), path.parent


def open_machine(plan: Plan, places: Places, folder: Path | None, settings: Settings) -> Machine:
    """Return a machine on a GPU, or on the CPU if the settings ask for it or `auto` finds no GPU to use.

    In the second case a warning names the line outside of mbc that opened the module.

    Raises:
        MbcError: The errors of `open_cuda`.
    """
    if settings.device != "cpu":
        from mbc.runtime.cuda import open_cuda

        def own_memory(size_bytes: int) -> Allocation:
            return settings.arena

        allocate = settings.allocate if settings.arena is None else own_memory
        try:
            return open_cuda(
                plan, places, folder,
                canaries=settings.canaries, eager=settings.eager, prefetch=settings.prefetch,
                membership=settings.membership, listener=settings.listener, allocate=allocate,
            )  # fmt: skip
        except MbcError as error:
            if settings.device == "cuda" or error.code not in _NO_CUDA:
                raise
            files = [Path(frame.filename) for frame in inspect.stack(0)]
            level = next((n for n, file in enumerate(files, 1) if not file.is_relative_to(PACKAGE)), len(files))
            warnings.warn(f"running on the CPU: {error.message}", RuntimeWarning, stacklevel=level)
    return Host(
        plan, places, shadow=settings.shadow, transfers=Transfers(settings.transfers), membership=settings.membership,
        arena=settings.arena,
    )  # fmt: skip
