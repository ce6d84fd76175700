"""`mbc train` in several ranks: their start, and what each of them does."""

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

# Arguments of a training that all ranks must have alike.
_SETTINGS = (
    "epochs", "lr", "schedule", "warmup", "step_epochs", "step_factor", "milestones", "power", "patience",
    "plateau_metric", "checkpoint_every", "keep_best", "log_every", "evaluate", "save_ema", "target",
)  # fmt: skip


def start_ranks(arguments: argparse.Namespace) -> int:
    """`--gpus N` on this machine; returns the exit code."""
    return run_ranks(arguments.words, arguments.gpus, arguments.device)


def run_ranks(words: Sequence[str], size: int, device: str, output: IO[bytes] | None = None) -> int:
    """`mbc` with these words as so many ranks on this machine; returns the exit code. `output`: where rank 0 prints,
    None: where this process does. Raises what `check_ranks` does."""
    check_ranks(size, device)
    start = launch_with_mpi if device_of_ranks(device) == "cpu" else launch
    return start(command_line(words), size, output)


def check_ranks(size: int, device: str) -> None:
    """MBC266 where this machine has fewer GPUs; MBC265 where there is no mpiexec for ranks on the CPU."""
    if device_of_ranks(device) == "cpu":
        mpiexec()
    else:
        check_gpus(size, len(local_gpus()))


@contextmanager
def silenced(silent: bool) -> Generator[None]:
    """Of all ranks the first one tells how the training goes; errors are told after the body, by each."""
    with ExitStack() as stack:
        if silent:
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


@contextmanager
def turn(ranks: Group) -> Generator[None]:
    """Rank 0 has the body first, then the first rank of each other machine, then the rest: one of them builds, the
    others find what it has made."""
    mine = 0 if ranks.rank == 0 else 1 if ranks.environment.local_rank == 0 else 2
    for _ in range(mine):
        ranks.barrier()
    yield
    for _ in range(mine, 2):
        ranks.barrier()


def device_of_ranks(device: str) -> str:
    """`cuda` or `cpu`: no rank may find that it has no GPU when the others have begun to use theirs."""
    return device if device != "auto" else "cuda" if local_gpus() else "cpu"


def check_plan_of_ranks(place: str, planning: Options, size: int) -> None:
    """MBC281 where `place` is planned already, for another number of ranks; MBC280 where the mini-batch of a source is
    too small for them, or what else is wrong with that."""
    file = plan_file(place)
    if file is not None:
        check_size(read_plan(file).graph.ranks, size)
        return
    from mbc.frontend.lower import lower
    from mbc.frontend.parse import parse

    even_rows(lower(parse(read_source(place)), planning.settings, planning.network).network.batch, size)


def what_ranks_share(arguments: argparse.Namespace, device: str, seed: int, resume: Path | None) -> dict[str, str]:
    """For `Group.agree`, before anything is planned: what is the same in all ranks of one training."""
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
    """Collective: what the modules of all ranks are made of, a package or their plans. A source is planned by rank 0,
    for all of them, and built once on each file system, as `package_for_training` does."""
    if Path(place).is_dir():
        return Path(place)
    planning = replace(planning, gpus=group.size, gpus_per_node=group.environment.local_size)
    builds = builds_package(device, output)
    made: tuple[Plan, ...] = ()
    if group.rank == 0:
        if builds:
            check_free(place, planning, output)
        made = sound_plans(place, planning)
    texts = json.loads(group.broadcast(json.dumps([dump_plan(plan) for plan in made]).encode()))
    plans = made or tuple(load_plan(text, f"what rank 0 planned of {place}") for text in texts)
    if builds:
        with turn(group):
            return up_to_date(plans, output)
    return plans


def plan_of_rank(plans: Sequence[Plan], rank: int) -> Plan:
    """The one that a rank runs."""
    return next((plan for plan in plans if plan.graph.ranks is not None and rank in plan.graph.ranks.members), plans[0])


def _digest(file: Path) -> str:
    """MBC183 where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    except OSError as error:
        raise MbcError(
            "MBC183",
            f"cannot read '{file}': {error.strerror or error}",
            "give a source (.mbc), a plan (.json) or a package",
        ) from error
