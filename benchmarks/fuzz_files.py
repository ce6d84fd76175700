"""Files of mbc as inputs, with the code that reads them: sources, plans, checkpoints, profiles and archives of data."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_mutants import NETWORK, probe
from fuzz_rule import check_text
from record import ROOT

GPU = "h200"


# Sources


def source_texts() -> list[str]:
    """Return the texts of the seed sources."""
    cases = sorted((ROOT / "tests" / "cases").rglob("*.mbc"))
    small = [path.read_text(encoding="utf-8") for path in cases]
    return [NETWORK, *(text for text in small if len(text) < 1500)]


def sources() -> list[bytes]:
    """Return the seed sources as bytes."""
    plan_texts()  # the profile and the solver are loaded once: no part of an input's time
    return [text.encode() for text in source_texts()]


@functools.cache
def words() -> list[str]:
    """Return the words and signs of the sources, and the names of all layers."""
    texts = [*source_texts(), (ROOT / "examples" / "resnet.mbc").read_text(encoding="utf-8")]
    from mbc.ops import LAYERS

    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text)} | set(LAYERS))


def judge_source(data: bytes, folder: Path) -> str:
    """Lower the text. Differentiate small networks, and plan a few of them."""
    from mbc.compiler import compile_plan
    from mbc.frontend.lower import lower
    from mbc.frontend.parse import parse
    from mbc.options import Options
    from mbc.passes.check_graph import verify_network, verify_training
    from mbc.passes.training_step import differentiate
    from mbc.source import Source

    try:
        source = Source("net.mbc", data.decode("utf-8"))
    except UnicodeDecodeError:
        return "no text"  # files.read_text refuses it
    lowered = lower(parse(source), (), None)
    verify_network(lowered.network)
    if len(lowered.network.operations) > 40:
        return "taken"
    verify_training(differentiate(lowered.network, lowered.optimizer, lowered.precision))
    if hashlib.sha256(data).digest()[0] < 12 and len(lowered.network.operations) <= 12:
        compile_plan(source, Options(gpu=GPU))
        return "planned"
    return "taken"


# Plans


@functools.cache
def plan_texts() -> tuple[bytes, ...]:
    """Return the seed plan files."""
    from mbc.compiler import compile_plan
    from mbc.options import Options
    from mbc.plan.file import dump_plan
    from mbc.source import Source

    items: list[bytes] = []
    for precision in ("fp32", "bf16"):
        options = Options(gpu=GPU, settings=(("train.precision", precision),))
        items.append(dump_plan(compile_plan(Source("probe.mbc", NETWORK), options)).encode())
    return tuple(items)


def judge_plan(data: bytes, folder: Path) -> str:
    """Read a plan with the checksum of its content, verify it, and generate its code."""
    from mbc.codegen.view import view
    from mbc.plan.file import load_plan
    from mbc.plan.schema import CHECKSUM, content_checksum
    from mbc.plan.summary import summarise
    from mbc.plan.verify import verify_plan

    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(text)
        if isinstance(document, dict) and isinstance(document.get(CHECKSUM), str):
            document[CHECKSUM] = content_checksum(document)
            text = json.dumps(document)
    plan = load_plan(text, "plan.json")
    verify_plan(plan)
    for program in (plan.train, plan.infer):
        summarise(plan, program)
    view(plan)
    return "taken"


# Checkpoints


@functools.cache
def _module() -> Any:
    return probe()


def checkpoints() -> list[bytes]:
    """Return the seed checkpoints."""
    import tempfile

    from mbc.train.epoch import Tally
    from mbc.train.training_checkpoint import Progress, save_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w"
        save_checkpoint(_module(), path, Progress(1, 2, 0, 2))
        whole = path.read_bytes()
        save_checkpoint(_module(), path, Progress(0, 0, 0, 2, running=Tally(steps=1)))
        return [whole, path.read_bytes()]


def judge_checkpoint(data: bytes, folder: Path) -> str:
    """Load the weights and the progress of the training from a checkpoint."""
    from mbc.train.training_checkpoint import load_checkpoint

    path = folder / "w.safetensors"
    path.write_bytes(data)
    load_checkpoint(_module(), path)
    return "taken"


# Profiles


def profiles() -> list[bytes]:
    """Return the seed profiles."""
    import gzip
    import tempfile

    from mbc.hardware.collective_times import CollectiveKind, CollectiveTime, Link
    from mbc.profile.model import Overhead
    from mbc.profile.writer import ProfileWriter
    from tests.profile.profiles import IDENTITY, measurement, request

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.sqlite"
        with ProfileWriter(path, IDENTITY) as writer:
            for kind in ("convolution", "convolution_backward_filter"):
                writer.record(request(8, kind), [measurement(1, 20.0), measurement(2, 10.0, 4096)])
            writer.record_constant("graph_gap_us", 1.25)
            writer.record_overhead(Overhead("context", "", 1 << 20))
            writer.record_collectives(
                [CollectiveTime(CollectiveKind.ALL_REDUCE, 2, Link.NVLINK, 8, 4096, 9.0, 9.0)], []
            )
        data = path.read_bytes()
        return [data, gzip.compress(data, mtime=0)]


def judge_profile(data: bytes, folder: Path) -> str:
    """Read a profile, packed or not, and look up the requests that a plan would look up."""
    from mbc.profile.read_profile import read_profile
    from tests.profile.profiles import request

    path = folder / ("p.sqlite.gz" if data[:2] == b"\x1f\x8b" else "p.sqlite")
    for left in folder.glob("p.sqlite*"):
        left.unlink()
    path.write_bytes(data)
    profile = read_profile(path)
    for rows in (4, 8):
        profile.candidates(request(rows))
    check_text(str(profile.identity))
    for rows_of in profile.measurements.values():
        for one in rows_of:
            check_text(f"{one.provider} {one.name} {one.refused} {one.notes}")
    return "taken"


# Data


def archives() -> list[bytes]:
    """Return the seed archives of data."""
    items: list[bytes] = []
    arrays = {"x": np.zeros((4, 2, 3, 3), np.float32), "t": np.arange(4, dtype=np.int64) % 3}
    for write in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        write(out, **arrays)
        items.append(out.getvalue())
    out = io.BytesIO()
    np.save(out, arrays["x"])
    return [*items, out.getvalue()]


def judge_archive(data: bytes, folder: Path) -> str:
    """Open an `.npz` file, or an `.npy` file beside a valid one, and read a mini-batch."""
    from mbc.train.accuracy import inputs_of
    from mbc.train.data import open_data
    from mbc.train.share import Share

    place = folder / "d.npz"
    if data[:6] == b"\x93NUMPY":
        place = folder / "d"
        place.mkdir(exist_ok=True)
        (place / "x.npy").write_bytes(data)
        np.save(place / "t.npy", np.arange(4) % 3)
    else:
        place.write_bytes(data)
    rows = open_data(str(place), inputs_of(_module().plan.graph))
    next(iter(rows.in_order(Share(2, 0, 2))), None)
    return "taken"
