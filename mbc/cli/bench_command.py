"""The command `mbc bench`."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbc.cli.arguments.shared import measuring_options
from mbc.cli.outputs import check_outputs
from mbc.cli.subject import Planned, build_package, plan_source, read_source
from mbc.cli.terminal import notes, output_width
from mbc.errors import MbcError
from mbc.hardware.target import current_gpu, local_gpus
from mbc.ir.types import DType
from mbc.options import SEVERAL_GPUS, Options
from mbc.progress import busy
from mbc.provenance import digests

RECORD = "--record"

if TYPE_CHECKING:
    from mbc.bench.contender_messages import Job
    from mbc.bench.race import Race
    from mbc.optimize.bounds.measured_floor import Floor
    from mbc.source import Source


def run(arguments: argparse.Namespace) -> int:
    """Plan, build and time a step, and compare it with the peers; return 1 if a contender computed another result."""
    from mbc.bench.contender_messages import Job
    from mbc.record.recorder import check_on_gpu, recording_tools
    from mbc.report.bench import bench_document, bench_text
    from mbc.report.html.render import check_writable
    from mbc.report.step_record import record_text

    source = read_source(arguments.source)
    output = None if arguments.output is None else Path(arguments.output)
    check_outputs({"-o": output, "--record": arguments.record}, {"NET": arguments.source})
    if output is not None:
        _check_writable(output)
    arguments.against = _peers_of(arguments.against, arguments.shared_by)
    _check_peers(arguments.against)
    _check_device(arguments.device)
    record = None if arguments.record is None else Path(arguments.record)
    if record is not None:
        recording_tools(arguments.device)
        check_writable(record, RECORD)
    _check_gpus(arguments.device, arguments.shared_by)
    given = measuring_options(arguments)
    # All contenders are timed on the step of one mini-batch.
    asked = replace(given, settings=(*given.settings, ("train.accumulate", "1")))
    one = None if asked.gpus == 1 else _one_gpu_options(source, asked)
    planned = plan_source(source, asked)
    _check_inputs(planned)
    on_gpu = _on_gpu(arguments.device, planned)
    if record is not None and not on_gpu:
        check_on_gpu("cpu")
    with tempfile.TemporaryDirectory(prefix="mbc-bench-") as folder:
        alone = "" if one is None else str(_package(plan_source(source, one), Path(folder) / "one", on_gpu))
        began_s = time.monotonic()
        package = _package(planned, Path(folder) / "all", on_gpu)
        job = Job(
            source,
            asked.settings,
            asked.network,
            str(package),
            "cuda" if on_gpu else "cpu",
            planned.seconds + time.monotonic() - began_s,
            arguments.seed,
            blocks=arguments.blocks,
            block_s=arguments.block,
            alone_package=alone,
        )
        recorded = None if record is None else _record(job, arguments, planned, record)
        result = _race(job, arguments, planned)
    floor = _floor(planned, asked) if on_gpu else None
    document = {
        **_machine(on_gpu),
        "code": digests(),
        "settings": dict(given.settings),
        **bench_document(planned.plan, result, floor, planned.seconds),
    }
    text = json.dumps(document, indent=2)
    if output is not None:
        _write(output, text + "\n")
    print(text if arguments.json else bench_text(planned.plan, result, floor, output_width()))
    if recorded is not None and not arguments.json:
        print(f"\n{record_text(recorded, output_width())}\nrecord of a step: {record}")
    return 0 if result.fair else 1


def _machine(on_gpu: bool) -> dict[str, str]:
    """Return when and on which device and software the contenders were timed."""
    here = current_gpu() if on_gpu else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": here.name if here is not None else f"CPU ({platform.machine()})",
        "driver": here.driver if here is not None else "",
        "python": platform.python_version(),
    }


def _race(job: Job, arguments: argparse.Namespace, planned: Planned) -> Race:
    from mbc.bench.race import race

    with busy("timing") as say:
        return race(
            job, arguments.against, planned.plan.graph.precision, arguments.most, say, arguments.modes,
            arguments.shared_by,
        )  # fmt: skip


def _record(job: Job, arguments: argparse.Namespace, planned: Planned, path: Path) -> Mapping[str, Any]:
    """Record a step in a process of its own, before the race: problems are then reported before the long part."""
    from mbc.bench.race import record
    from mbc.report.html.render import write_text
    from mbc.report.step_record import dump_record, record_document

    with busy("recording a step"):
        document = record_document(planned.plan, record(job, arguments.shared_by, arguments.most))
    write_text(path, dump_record(document), RECORD)
    return document


def _check_peers(peers: Sequence[str]) -> None:
    """Note the peers that are not installed; raise MBC223 if none is."""
    from mbc.bench.contender_messages import PACKAGES, missing

    packages = missing(peers)
    absent = [peer for peer in peers if PACKAGES[peer] in packages]
    if not absent:
        return
    here = f"{'is' if len(packages) == 1 else 'are'} not installed here"
    remedy = f"install {' or '.join(packages)} into this Python, or name other peers with --against"
    if len(absent) == len(peers):
        raise MbcError("MBC223", f"there is no peer to compare with: {' and '.join(packages)} {here}", remedy)
    print(f"note: {' and '.join(packages)} {here}: {', '.join(absent)} will not run", file=sys.stderr)


def _peers_of(peers: Sequence[str], gpus: int) -> tuple[str, ...]:
    """Return the peers that can run on this number of GPUs; raise MBC278 if there is none."""
    able = tuple(peer for peer in peers if gpus == 1 or peer in SEVERAL_GPUS)
    if not able:
        raise MbcError(
            "MBC278",
            f"{' and '.join(peers)} {'is' if len(peers) == 1 else 'are'} timed on one GPU only",
            f"with --gpus name {' or '.join(SEVERAL_GPUS)} in --against",
        )
    if able != tuple(peers):
        print(
            f"note: only {' and '.join(able)} {'is' if len(able) == 1 else 'are'} timed on {gpus} GPUs", file=sys.stderr
        )
    return able


def _check_gpus(device: str, gpus: int) -> None:
    """Raise MBC277 if this machine has fewer GPUs; on a CPU, this number of processes runs instead."""
    here = len(local_gpus())
    if device != "cpu" and here and gpus > here:
        raise MbcError(
            "MBC277",
            f"this machine has {here} {'GPU' if here == 1 else 'GPUs'}, not {gpus}",
            "lower --gpus, or use --device cpu, which runs as many processes on the CPU instead",
        )


def _one_gpu_options(source: Source, asked: Options) -> Options:
    """Return the options for one GPU alone, whose mini-batch is its part of the rows.

    Raises:
        MbcError: MBC276, the rows cannot be divided equally between the GPUs.
    """
    from mbc.fit import own_batch, with_batch

    batch = own_batch(source, asked)
    if batch % asked.gpus:
        raise MbcError(
            "MBC276",
            f"{batch} rows cannot be divided equally between {asked.gpus} GPUs, as DDP does",
            f"set a batch that is a multiple of {asked.gpus}",
        )
    return with_batch(replace(asked, gpus=1), batch // asked.gpus)


def _check_device(device: str) -> None:
    if device == "cpu" or current_gpu() is not None:
        return
    if device == "cuda":
        raise MbcError("MBC221", "there is no GPU here to time on", "use --device cpu; mbc doctor says more")
    print("note: there is no GPU here: all contenders run on the CPU, where large networks take long", file=sys.stderr)


def _check_inputs(planned: Planned) -> None:
    """Raise MBC243 if an input has bytes: `augment` would draw random transformations that no peer draws."""
    graph = planned.plan.graph
    for value in (graph.values[name] for name in graph.inputs):
        if value.type.dtype is DType.UINT8:
            message = f"input '{value.name}' has bytes: `augment` would draw random transformations that no peer draws"
            raise MbcError(
                "MBC243", message, "give the network an input of floats, `: float`, without augment", value.span
            )


def _on_gpu(device: str, planned: Planned) -> bool:
    if device == "cpu" or current_gpu() is None:
        return False
    if planned.plan.is_timed:
        return True
    if device == "cuda":
        raise MbcError("MBC221", "no GPU times a step in fp64", "use --device cpu, or another train.precision")
    print("note: fp64 runs on the CPU only: all contenders run there", file=sys.stderr)
    return False


def _package(planned: Planned, folder: Path, on_gpu: bool) -> Path:
    """Return the built package that mbc runs on a GPU, or the plan that it runs on the CPU."""
    if not on_gpu:
        from mbc.plan.file import dump_plan

        folder.mkdir()
        file = folder / "plan.json"
        file.write_text(dump_plan(planned.plan), encoding="utf-8")
        return file
    package = build_package(planned.plan, folder, overwrite=False)
    if package.library is None:
        missing = package.missing[0] if package.missing else "a part of the toolkit"
        raise MbcError("MBC221", f"the step cannot be built for the GPU without {missing}", "or use --device cpu")
    return package.folder


def _floor(planned: Planned, asked: Options) -> Floor:
    from mbc.analysis.roofline import device_of
    from mbc.optimize.bounds.measured_floor import graph_floor
    from mbc.profile.locate import find_profile

    device = device_of(planned.plan)
    with notes(), busy("finding the floor"):
        return graph_floor(planned.plan.graph, device, find_profile(device, asked.profile, asked.stale_profile))


def _check_writable(path: Path) -> None:
    """Raise MBC222 before anything is timed, if the result cannot be written. An existing file stays until then."""
    new = not path.exists()
    _write(path, "", "a")
    if new:
        path.unlink()


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise MbcError("MBC222", f"cannot write '{path}': {error.strerror or error}", "choose another -o") from error
