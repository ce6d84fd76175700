"""The ranks of `mbc train`: how they are started, and the work that each of them does."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import IO

from mbc.cli.arguments.shared import options
from mbc.cli.subject import builds_package, check_free, plan_file, read_plan, read_source, sound_plans, up_to_date
from mbc.errors import MbcError
from mbc.hardware.target import local_gpus
from mbc.ir.ranks import even_rows
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan
from mbc.ranks.launch import check_gpus, command_line, launch, launch_with_mpi, mpiexec
from mbc.ranks.rank_group import Group
from mbc.runtime.membership import check_size
from mbc.version import __version__

# Arguments of a training that must be equal in all ranks.
_SETTINGS = (
    "epochs", "lr", "schedule", "warmup", "step_epochs", "step_factor", "milestones", "power", "patience",
    "plateau_metric", "checkpoint_every", "keep_best", "log_every", "evaluate", "save_ema", "target",
)  # fmt: skip


def start_ranks(arguments: argparse.Namespace) -> int:
    """Start `--gpus N` ranks on this machine; return the exit code."""
    return run_ranks(arguments.words, arguments.gpus, arguments.device)


def run_ranks(words: Sequence[str], size: int, device: str, output: IO[bytes] | None = None) -> int:
    """Run `mbc` with these words as `size` ranks on this machine; return the exit code.

    Args:
        words: Words of the command line without the program's name.
        size: Number of ranks.
        device: Value of --device.
        output: File for the output of rank 0; None for the stdout of this process.

    Raises:
        MbcError: MBC265 and MBC266 as `check_ranks` raises them.
    """
    check_ranks(size, device)
    start = launch_with_mpi if device_of_ranks(device) == "cpu" else launch
    return start(command_line(words), size, output)


def check_ranks(size: int, device: str) -> None:
    """Raise MBC266 if this machine has fewer GPUs, MBC265 if there is no mpiexec for ranks on the CPU."""
    if device_of_ranks(device) == "cpu":
        mpiexec()
    else:
        check_gpus(size, len(local_gpus()))


@contextmanager
def silenced(silent: bool) -> Generator[None]:
    """Discard the output of the body where `silent`: only rank 0 shows progress, but each rank prints its errors."""
    with ExitStack() as stack:
        if silent:
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


@contextmanager
def turn(ranks: Group) -> Generator[None]:
    """Run the body on rank 0 first, then on the first rank of each other machine, then on the rest.

    So one rank builds a package, and the others use it.
    """
    mine = 0 if ranks.rank == 0 else 1 if ranks.environment.local_rank == 0 else 2
    for _ in range(mine):
        ranks.barrier()
    yield
    for _ in range(mine, 2):
        ranks.barrier()


def device_of_ranks(device: str) -> str:
    """Return `cuda` or `cpu` for all ranks.

    No rank may discover that it has no GPU after the others have begun to use theirs.
    """
    return device if device != "auto" else "cuda" if local_gpus() else "cpu"


def check_plan_of_ranks(place: str, planning: Options, size: int) -> None:
    """Check that `place` can be trained by `size` ranks.

    Raises:
        MbcError: MBC281, `place` is planned for another number of ranks; MBC280, the mini-batch of the source has too
            few rows; or any other error of the source.
    """
    file = plan_file(place)
    if file is not None:
        check_size(read_plan(file).graph.ranks, size)
        return
    from mbc.frontend.lower import lower
    from mbc.frontend.parse import parse

    even_rows(lower(parse(read_source(place)), planning.settings, planning.network).network.batch, size)


def what_ranks_share(arguments: argparse.Namespace, device: str, seed: int, resume: Path | None) -> dict[str, str]:
    """Return everything that must be equal in all ranks of a training, for `Group.agree` before anything is planned."""
    place = arguments.network_or_package
    subject = plan_file(place) or Path(place)
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    return {
        "version of mbc": __version__,
        "device": device,
        f"'{place}' (digest)": _digest(subject),
        "options of planning (digest)": options(arguments).digest,
        **{f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()},
        "seed": str(seed),
        "checkpoint to begin from (digest)": "" if resume is None else _digest(resume),
    }


def subject_for_ranks(
    place: str, planning: Options, device: str, output: str | None, group: Group
) -> Path | tuple[Plan, ...]:
    """Return the package or the plans from which the modules of all ranks are opened (collective).

    Rank 0 plans a source for all ranks. The package is built once on each file system, under the rules of
    `package_for_training`.
    """
    if Path(place).is_dir():
        return Path(place)
    planning = replace(planning, gpus=group.size, gpus_per_node=group.environment.local_size)
    builds = builds_package(device, output)
    planned: tuple[Plan, ...] = ()
    if group.rank == 0:
        if builds:
            check_free(place, planning, output)
        planned = sound_plans(place, planning)
    texts = json.loads(group.broadcast(json.dumps([dump_plan(plan) for plan in planned]).encode()))
    plans = planned or tuple(load_plan(text, f"what rank 0 planned of {place}") for text in texts)
    if builds:
        with turn(group):
            return up_to_date(plans, output)
    return plans


def plan_of_rank(plans: Sequence[Plan], rank: int) -> Plan:
    """Return the plan that a rank runs."""
    return next((plan for plan in plans if plan.graph.ranks is not None and rank in plan.graph.ranks.members), plans[0])


def _digest(file: Path) -> str:
    """Return a digest of a file; raise MBC183 if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    except OSError as error:
        raise MbcError(
            "MBC183",
            f"cannot read '{file}': {error.strerror or error}",
            "give a source (.mbc), a plan (.json) or a package",
        ) from error
