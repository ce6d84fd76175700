"""Sources, plans and packages that the user names on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mbc import files
from mbc.cli.terminal import notes
from mbc.errors import MbcError
from mbc.frontend.near import nearest
from mbc.options import Options
from mbc.plan.file import MOST_BYTES, PLAN_FILE
from mbc.progress import busy
from mbc.source import Source

if TYPE_CHECKING:
    from mbc.codegen.build import Package
    from mbc.ir.graph import TrainingGraph
    from mbc.plan.model import Plan


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a source, with the time that planning took.

    Attributes:
        plan: Plan of the first rank.
        seconds: Time of planning, without the measuring of kernels.
        others: Plans of the ranks that do not run the first plan.
    """

    plan: Plan
    seconds: float
    others: tuple[Plan, ...] = ()


def read_text(path: Path) -> str:
    """Return the text of a file; raise MBC183 if it cannot be read."""
    near: str | None = None
    try:
        return files.read_text(path, MOST_BYTES)
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 text (byte {error.start})"
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            near = nearest(path.name, _names_in(path.parent))
    meant = f"did you mean '{path.with_name(near)}'? Else " if near else ""
    raise MbcError(
        "MBC183", f"cannot read '{path}': {reason}", f"{meant}give a source (.mbc), a plan (.json) or a package"
    )


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none if the folder cannot be read."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def read_source(place: str, remedy: str = "give its source (.mbc)") -> Source:
    """Return a source file; raise MBC183 if it cannot be read, MBC188 with `remedy` for a plan or a package."""
    if plan_file(place) is not None:
        raise MbcError("MBC188", f"'{place}' is planned already", remedy)
    return Source(place, read_text(Path(place)))


def plan_file(place: str) -> Path | None:
    """Return the path of the plan that `place` names as a file or as a package; None for a source.

    Raises:
        MbcError: MBC184, `place` is a folder without a plan.
    """
    path = Path(place)
    if path.is_dir():
        if not (path / PLAN_FILE).is_file():
            raise MbcError(
                "MBC184", f"the folder '{place}' is no package: it has no {PLAN_FILE}", "make one with mbc compile"
            )
        return path / PLAN_FILE
    return path if path.suffix == ".json" else None


def read_plan(path: Path) -> Plan:
    """Read the plan of a file and check its form; its meaning is checked by `mbc verify`."""
    from mbc.plan.file import load_plan

    return load_plan(read_text(path), str(path))


def plan_source(source: Source, options: Options) -> Planned:
    """Plan a source."""
    from mbc.compiler import compile_plans
    from mbc.stages import Stages

    with notes(), busy(f"planning {source.name}") as say:
        stages = Stages(announce=say)
        plan, *others = compile_plans(source, options, stages)
    return Planned(plan, stages.planning_seconds, tuple(others))


def find_plan(place: str, options: Options) -> Plan:
    """Return the plan that `place` names; a source is planned now."""
    file = plan_file(place)
    return plan_source(read_source(place), options).plan if file is None else read_plan(file)


def plans_of_ranks(place: str, options: Options) -> tuple[Plan, ...]:
    """Return the plans of all ranks that `place` names; a source is planned now, a package has a folder for each."""
    file = plan_file(place)
    if file is None:
        planned = plan_source(read_source(place), options)
        return (planned.plan, *planned.others)
    inside = sorted(Path(place).glob(f"rank*/{PLAN_FILE}")) if Path(place).is_dir() else []
    return (read_plan(file), *map(read_plan, inside))


def sound_plans(place: str, options: Options) -> tuple[Plan, ...]:
    """Return the verified plans that `place` names: for a source the plans of all ranks, for a file its only plan."""
    if plan_file(place) is not None:
        return (sound_plan(place, options),)
    planned = plan_source(read_source(place), options)
    return (planned.plan, *planned.others)


def sound_plan(place: str, options: Options) -> Plan:
    """Return the plan that `place` names, to be run or built.

    A plan from a file is verified here. A plan of a source was verified when it was made.
    """
    plan = find_plan(place, options)
    if plan_file(place) is not None:
        from mbc.plan.verify import verify_plan
        from mbc.plan.verify_source import verify_source

        with busy(f"verifying {place}"):
            verify_plan(plan)
            verify_source(plan)
    return plan


def training_graph(place: str, options: Options) -> TrainingGraph:
    """Return the graph of the training step that `place` names, planned or not."""
    file = plan_file(place)
    if file is not None:
        return read_plan(file).graph
    from mbc.frontend.lower import lower
    from mbc.frontend.parse import parse
    from mbc.passes.training_step import differentiate

    lowered = lower(parse(read_source(place)), options.settings, options.network)
    return differentiate(lowered.network, lowered.optimizer, lowered.precision)


def check_plannable(place: str, options: Options) -> None:
    """Raise MBC188 if options of planning are given for a finished plan, which they could not change."""
    if options != Options() and plan_file(place) is not None:
        raise MbcError(
            "MBC188", f"'{place}' is planned already: --gpu, --set and other planning options do not change it",
            "give its source instead, or leave these options out",
        )  # fmt: skip


def build_package(plan: Plan, folder: Path, overwrite: bool, *others: Plan) -> Package:
    """Write the package of a plan and of the plans of other ranks, and build what the installed tools allow."""
    from mbc.codegen.build import write_package
    from mbc.codegen.toolchain import find_toolchain

    with busy(f"building {folder}"):
        return write_package((plan, *others), folder, find_toolchain(), overwrite)


def package_for_training(place: str, options: Options, device: str, output: str | None) -> Path | Plan:
    """Return the package or plan from which a module is opened; a source is planned now.

    A source is built as a package only where a GPU could use it, into `output` or a folder named after the network. A
    package that holds this plan already is not built again.
    """
    if Path(place).is_dir():
        assert plan_file(place) is not None
        return Path(place)
    builds = builds_package(device, output)
    if builds:
        check_free(place, options, output)
    plan = sound_plan(place, options)
    return up_to_date((plan,), output) if builds else plan


def builds_package(device: str, output: str | None) -> bool:
    """Return whether a module of a source is opened from a package rather than from a plan."""
    from mbc.hardware.target import local_gpus

    return output is not None or device == "cuda" or (device == "auto" and bool(local_gpus()))


def check_free(place: str, options: Options, output: str | None) -> None:
    """Raise MBC093, MBC094 or MBC099 if the package of a source could not be written; called before planning."""
    from mbc.codegen.build import check_output
    from mbc.frontend.lower import choose_network
    from mbc.frontend.parse import parse

    if plan_file(place) is None:
        network = choose_network(parse(read_source(place)), options.network)
        check_output(Path(output or network.name), overwrite=True)


def up_to_date(plans: Sequence[Plan], output: str | None) -> Path:
    """Return the package of these plans, built unless the folder holds it already."""
    from mbc.plan.file import dump_plan, rank_folder

    first, *others = plans
    folder = Path(output or first.graph.name)
    files = {folder / PLAN_FILE: first} | {folder / rank_folder(other) / PLAN_FILE: other for other in others}
    if all(file.is_file() and read_text(file) == dump_plan(plan) for file, plan in files.items()):
        return folder
    return build_package(first, folder, True, *others).folder
