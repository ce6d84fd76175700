"""The command `mbc profile`."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbc.cli.subject import read_source
from mbc.cli.terminal import bar, notes, output_width
from mbc.errors import MbcError
from mbc.hardware.part import GpuName, split_name
from mbc.measure.need import MOST_WORKSPACE_BYTES, Need
from mbc.options import Policy
from mbc.progress import StatusLine, announcements_to, busy
from mbc.units import show_duration, show_size

if TYPE_CHECKING:
    from mbc.hardware.spec import DeviceSpec
    from mbc.measure.fleet import Outcome, Progress
    from mbc.profile.model import Profile


def run(arguments: argparse.Namespace) -> int:
    """Measure kernels, or list, compare, merge, ship or exchange profiles, as the subcommand says."""
    verbs = {
        "run": _measure, "list": _list, "diff": _diff, "merge": _merge, "ship": _ship, "export": _export,
        "import": _import,
    }  # fmt: skip
    return verbs[arguments.verb](arguments)


def _measure(arguments: argparse.Namespace) -> int:
    from mbc.cli.profile_machine import all_parts, measure, missing
    from mbc.measure import fleet
    from mbc.measuring import shortcomings
    from mbc.profile.locate import own_path

    if not arguments.networks and arguments.gpu != "all":
        arguments.wrong(
            "networks are missing: NET\nname some, or measure collectives and copies of several GPUs with --gpu all"
        )
    gpu = split_name(arguments.gpu)
    gpus = fleet.choose_gpus(gpu.whole)
    gpu = gpu._replace(whole=fleet.name_of(gpus[0]))
    name = str(gpu)
    if not arguments.networks:
        with notes():
            path = Path(arguments.output) if arguments.output else own_path(name)
        return _machine(arguments, gpus, path)
    with busy("collecting what plans may use"):
        needs = collect(arguments, _spec(gpu))
    with notes():
        path = Path(arguments.output) if arguments.output else own_path(name)
    limit_bytes = MOST_WORKSPACE_BYTES if arguments.workspace_limit is None else arguments.workspace_limit
    task = fleet.Task(
        needs, path, arguments.measure_for, limit_bytes, arguments.again,
        multiprocessors=gpu.multiprocessors, pose=gpu.pose,
    )  # fmt: skip
    began_s = time.monotonic()
    view = _View()
    for note in fleet.sharing_notes(gpus):
        view.note(note)
    try:
        with announcements_to(view.line):
            outcome = fleet.measure_on(gpus, task, view.show)
    finally:
        view.stop()
    seconds = time.monotonic() - began_s
    if arguments.json:
        print(json.dumps(_figures(path, gpus, outcome, seconds), indent=2))
    else:
        print(_summary(path, outcome, seconds))
    for note in shortcomings(outcome):
        view.note(note)
    if outcome.left:
        view.note("the same command again goes on from here")
    if outcome.interrupted:
        return 130
    if arguments.gpu == "all" and len(gpus) > 1:
        measure(tuple(all_parts(gpus)) if arguments.again else missing(path, gpus), gpus, path)
    return 0


def _machine(arguments: argparse.Namespace, gpus: tuple[str, ...], path: Path) -> int:
    """Measure collectives and copies of the GPUs, also those that the profile has already."""
    from mbc.cli.profile_machine import all_parts, measure

    began_s = time.monotonic()
    outcome = measure(tuple(all_parts(gpus)), gpus, path)
    if not outcome.lines:
        raise outcome.failures[0]
    seconds = round(time.monotonic() - began_s, 3)
    if arguments.json:
        print(json.dumps({"profile": str(path), "gpus": list(gpus), "seconds": seconds, **outcome.figures}, indent=2))
    else:
        print("\n".join(outcome.lines))
    return 0


def _spec(name: GpuName) -> DeviceSpec:
    from mbc.hardware.spec import known_spec, restricted
    from mbc.hardware.target import find_device

    return restricted(known_spec(name.whole) or find_device("auto"), name)


def collect(arguments: argparse.Namespace, device: DeviceSpec) -> tuple[Need, ...]:
    """Return the operations that plans of the networks may use in all precisions, each once with its total weight."""
    from mbc.frontend.lower import lower
    from mbc.frontend.parse import parse
    from mbc.optimize.search.profiling_requests import needs
    from mbc.passes.training_step import differentiate

    merged: dict[object, Need] = {}
    for place in arguments.networks:
        program = parse(read_source(place))
        for precision in arguments.precision or (None,):
            chosen = () if precision is None else (("train.precision", precision),)
            lowered = lower(program, (*arguments.settings, *chosen), arguments.network)
            if not lowered.precision.runs_on_gpus:
                raise MbcError(
                    "MBC192", f"'{place}' is in fp64, which runs on the CPU only: there is nothing to measure",
                    "choose other precisions: --precision fp32,tf32,bf16,fp16",
                )  # fmt: skip
            graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
            for need in needs(graph, device, Policy(arguments.policy)):
                earlier = merged.get(need.undivided)
                merged[need.undivided] = need if earlier is None else _united(earlier, need)
    return tuple(merged.values())


def _united(a: Need, b: Need) -> Need:
    return replace(a if len(a.requests) >= len(b.requests) else b, weight_us=a.weight_us + b.weight_us)


def _summary(path: Path, outcome: Outcome, seconds: float) -> str:
    s = outcome.summary
    if s is None:
        return f"{path}: nothing was measured"
    lines = [
        f"{path}: {s.measured} operations and sizes measured in {show_duration(seconds)}, "
        f"{s.already_measured} were known, {s.ruled_out} are too small to gain, {outcome.left} are left"
    ]
    if s.measured:
        lines.append(
            f"  {s.candidates} kernels can be used ({s.dominated} run once only, being slow), {s.refused} are refused"
        )
    lines.append("  what is known: mbc profile list " + str(path))
    return "\n".join(lines)


def _figures(path: Path, gpus: tuple[str, ...], outcome: Outcome, seconds: float) -> dict[str, Any]:
    counts = {} if outcome.summary is None else asdict(outcome.summary)
    return {
        "profile": str(path),
        "gpus": list(gpus),
        "seconds": round(seconds, 3),
        "interrupted": outcome.interrupted,
        **{("known" if name == "already_measured" else name): value for name, value in counts.items()},
        "left": outcome.left,
    }


class _View:
    """The progress of measuring on stderr."""

    def __init__(self) -> None:
        self._line = StatusLine()
        self._line.update("starting to measure")

    def show(self, now: Progress) -> None:
        if not self._line.due():
            return
        from mbc.profile.signature import described

        share = now.done / max(1, now.total)
        left = "" if now.left_s is None else f"  {show_duration(now.left_s)} left"
        self._line.update(f"{bar(share)} {now.done}/{now.total}{left}  {described(now.request)}")

    def stop(self) -> None:
        self._line.clear()

    def line(self, text: str) -> None:
        self._line.line(text)

    def note(self, text: str) -> None:
        self.line(f"note: {text}")


def _list(arguments: argparse.Namespace) -> int:
    from mbc.profile.paths import known_profiles
    from mbc.profile.read_profile import read_profile
    from mbc.report.profiles import contents, contents_text

    files = [Path(file) for file in arguments.files] or list(known_profiles())
    if arguments.json:
        print(json.dumps([asdict(contents(read_profile(file), file.stat().st_size)) for file in files], indent=2))
        return 0
    for index, file in enumerate(files):
        listed = contents(read_profile(file), file.stat().st_size)
        print(("\n" if index else "") + contents_text(listed, output_width()))
    if not files:
        print("no profile is here: mbc profile NET makes one on a machine with a GPU")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from mbc.profile.profile_diff import diff_profiles
    from mbc.profile.read_profile import read_profile
    from mbc.report.profiles import profile_diff_document, profile_diff_text

    before, after = (read_profile(Path(file)) for file in (arguments.before, arguments.after))
    diff = diff_profiles(before, after)
    if arguments.json:
        print(json.dumps(profile_diff_document(diff), indent=2))
    else:
        print(profile_diff_text(before, after, diff, output_width(), arguments.limit))
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from mbc.profile.edit import merged, write_profile
    from mbc.profile.read_profile import read_profile

    files, target = [Path(file) for file in arguments.files], Path(arguments.output)
    if target.exists() and not any(file.exists() and file.samefile(target) for file in files):
        raise MbcError(
            "MBC193", f"'{target}' exists, and is none of the profiles that are merged",
            "name it among them to keep what it holds, or choose another -o",
        )  # fmt: skip
    first, *others = (read_profile(file) for file in files)
    for other in others:
        first = merged(first, other)
    write_profile(first, target)
    return _written(arguments, first, target)


def _ship(arguments: argparse.Namespace) -> int:
    from mbc.profile.edit import shippable, write_profile
    from mbc.profile.read_profile import read_profile

    part, target = shippable(read_profile(Path(arguments.file))), Path(arguments.output)
    write_profile(part, target)
    return _written(arguments, part, target)


def _export(arguments: argparse.Namespace) -> int:
    from mbc.hardware.target import find_device
    from mbc.profile.edit import write_profile
    from mbc.profile.locate import measured_here

    profile, target = measured_here(find_device(arguments.gpu).name), Path(arguments.file)
    write_profile(profile, target)
    return _written(arguments, profile, target)


def _import(arguments: argparse.Namespace) -> int:
    from mbc.profile.edit import merged, write_profile
    from mbc.profile.locate import own_path
    from mbc.profile.read_profile import read_profile

    profile = read_profile(Path(arguments.file))
    with notes():
        target = own_path(profile.identity.gpu)
    if target.is_file():
        profile = merged(read_profile(target), profile)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, target)
    return _written(arguments, profile, target)


def _written(arguments: argparse.Namespace, profile: Profile, path: Path) -> int:
    candidates, requests = sum(map(len, profile.measurements.values())), {*profile.extents, *profile.measurements}
    size_bytes = path.stat().st_size
    if arguments.json:
        figures = {"profile": str(path), "requests": len(requests), "candidates": candidates}
        print(json.dumps(figures | {"to_measure_again": len(profile.outdated), "size_bytes": size_bytes}, indent=2))
    else:
        print(
            f"{path}: {candidates} kernels for {len(requests)} operations and sizes of {profile.identity}, "
            f"{show_size(size_bytes)}"
            + (
                f"; {len(profile.outdated)} to be measured again: kernels were rewritten since"
                if profile.outdated
                else ""
            )
        )
    return 0
