"""Generated code of one of several ranks: each bucket is one call of NCCL's, through what Python gives the module."""

from __future__ import annotations

import ctypes
import math
import re
from functools import cache
from pathlib import Path

import pytest

from mbc.codegen.build import write_sources
from mbc.codegen.view import STREAMS, View, view
from mbc.compiler import compile_plans
from mbc.hardware.collective_times import CollectiveModel
from mbc.hardware.streams import Stream
from mbc.options import Options
from mbc.plan.model import Kernel, Plan
from mbc.resources import folder
from mbc.runtime.library import RanksInterface
from mbc.source import Source
from tests.codegen.fakes import (
    ARENA,
    COMMUNICATOR,
    HOST,
    PROGRAMS,
    Call,
    as_planned,
    compile_against_fake,
    expected_log,
    loaded,
    parse_log,
    run_against_fake,
)
from tests.gathering import small_gradients_are_gathered

SOURCE = """network net(batch = 12) {
  input image[batch, 3, 8, 8] : float
  input label[batch] : class
  x = image |> conv(5, 3, pad=1) |> relu |> conv(7, 3, pad=1, stride=2, bias=true) |> relu
  logits = x |> flatten |> linear(3)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
"""


@cache
def plan_of_two(precision: str = "fp32") -> Plan:
    options = Options(gpu="h200", gpus=2, settings=(("train.precision", precision),))
    (plan,) = compile_plans(Source("net.mbc", SOURCE), options)
    return plan


def buckets(plan: Plan) -> list[tuple[int, int, int]]:
    """Return the launch, the offset and the elements of each bucket.

    A bucket extends from the first byte of its first gradient to the last byte of its last gradient.
    """
    result: list[tuple[int, int, int]] = []
    for number, launch in enumerate(plan.train.launches):
        if isinstance(launch.work, Kernel) and launch.work.provider == "nccl":
            places = [access.buffer for access in launch.accesses]
            start = min(plan.offsets[b] for b in places)
            sizes = [math.prod(plan.graph.values[plan.buffers[b].value or ""].type.shape) * 4 for b in places]
            stop = max(plan.offsets[b] + size for b, size in zip(places, sizes, strict=True))
            result.append((number, start, (stop - start) // 4))
    return result


def collectives(log: object) -> list[Call]:
    assert isinstance(log, tuple)
    return [entry for entry in log if isinstance(entry, Call) and entry.name == "nccl"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_bucket_is_one_sum_in_place(tmp_path: Path, precision: str) -> None:
    plan = plan_of_two(precision)
    run = run_against_fake(plan, tmp_path)
    planned = buckets(plan)
    assert planned
    for log in (run.eager, run.captured):
        for name in PROGRAMS:
            assert as_planned(log[name]) == expected_log(plan, name)
        sums = collectives(log["train"])
        assert [(call.offsets, call.integers) for call in sums] == [((at, at), (n,)) for _, at, n in planned]
        for call in sums:
            assert STREAMS[call.stream] is Stream.COLLECTIVE
            # ncclFloat32, ncclSum
            assert [call.detail(name) for name in ("type", "operation")] == ["7", "0"]
            assert call.detail("communicator") == str(COMMUNICATOR)
        assert not collectives(log["infer"])


def test_by_copies_each_rank_sums_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveModel, "choices", lambda *_: (0,))
    (plan,) = compile_plans(Source("net.mbc", SOURCE), Options(gpu="h200", gpus=2))
    run = run_against_fake(plan, tmp_path)
    launches = [launch for launch in plan.train.launches if launch.stream is Stream.COLLECTIVE]
    for log in (run.eager["train"], run.captured["train"]):
        assert as_planned(log) == expected_log(plan, "train")
        sums = collectives(log)
        assert len(sums) == len(launches) > 0
        for call, launch in zip(sums, launches, strict=True):
            bucket, parts = (plan.offsets[launch.accesses[i].buffer] for i in (0, -1))
            size_bytes = plan.buffers[launch.accesses[-1].buffer].size_bytes
            part = size_bytes // 4 // 2  # of two ranks
            own = bucket + part * 4  # this is rank 1
            assert (call.offsets, call.integers) == ((bucket, parts), (part,))
            assert call.detail("mbc_sum_parts") == f"offsets={parts},{own} integers=2,{part}"
            assert call.detail("all_gather") == f"offsets={own},{bucket} integers={part},7"


SYNCHRONISED = SOURCE.replace("|> relu |> conv(7", "|> bn(sync=true) |> relu |> conv(7")


def test_a_gather_is_one_group_of_calls(tmp_path: Path) -> None:
    (plan,) = compile_plans(Source("net.mbc", SYNCHRONISED), Options(gpu="h200", gpus=2))
    run = run_against_fake(plan, tmp_path)
    launches = [w for w in plan.train.launches if isinstance(w.work, Kernel) and w.work.name == "all_gather"]
    assert len(launches) == 2  # mean and variance, and the reductions of the backward pass
    for log in (run.eager["train"], run.captured["train"]):
        assert as_planned(log) == expected_log(plan, "train")
        gathers = [call for call in collectives(log) if "group_end" in dict(call.details)]
        assert len(gathers) == len(launches)
        for call, launch in zip(gathers, launches, strict=True):
            places = [plan.offsets[access.buffer] for access in launch.accesses]
            assert STREAMS[call.stream] is Stream.COLLECTIVE
            # Elements of one rank's operand, ncclFloat32.
            assert (call.offsets, call.integers) == ((places[0], places[2]), (5, 7))
            assert call.detail("all_gather") == f"offsets={places[1]},{places[3]} integers=5,7"
    assert not collectives(run.eager["infer"])


WIDE = SOURCE.replace("|> linear(3)", "|> linear(224) |> linear(3)").replace("batch = 12", "batch = 4")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_operands_of_a_gradient_are_gathered_in_words(tmp_path: Path, precision: str) -> None:
    options = Options(gpu="h200", gpus=2, settings=(("train.precision", precision),))
    with small_gradients_are_gathered():
        (plan,) = compile_plans(Source("net.mbc", WIDE), options)
    run = run_against_fake(plan, tmp_path)
    (launch,) = (w for w in plan.train.launches if isinstance(w.work, Kernel) and w.work.name == "all_gather")
    for log in (run.eager["train"], run.captured["train"]):
        assert as_planned(log) == expected_log(plan, "train")
        (call,) = (call for call in collectives(log) if "group_end" in dict(call.details))
        places = [plan.offsets[access.buffer] for access in launch.accesses]
        # Two rows of 7 x 4 x 4 and of 224 elements in the working type, which are moved as ncclFloat32.
        x, dy = (n * (4 if precision == "fp32" else 2) // 4 for n in (2 * 112, 2 * 224))
        assert (call.offsets, call.integers) == ((places[0], places[2]), (x, 7))
        assert call.detail("all_gather") == f"offsets={places[1]},{places[3]} integers={dy},7"


# 64 filters and 70 outputs: two ranks share both evenly, three neither.
SHARDED = (
    SOURCE.replace("conv(5", "conv(64").replace("|> linear(3)", "|> linear(70) |> linear(3)")
    + "train { optimizer = adamw  shard_optimizer = true }"
)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sharded_optimizer_scatters_and_gathers_in_groups(tmp_path: Path, size: int) -> None:
    (plan,) = compile_plans(Source("net.mbc", SHARDED), Options(gpu="h200", gpus=size))
    run = run_against_fake(plan, tmp_path)
    named = {"reduce_scatter": "reduce", "gather_parts": "broadcast"}
    shards = [w for w in plan.train.launches if isinstance(w.work, Kernel) and w.work.name in named]
    assert {w.work.name for w in shards if isinstance(w.work, Kernel)} == set(named)
    planned = [w for w in plan.train.launches if isinstance(w.work, Kernel) and w.work.provider == "nccl"]
    for log in (run.eager["train"], run.captured["train"]):
        assert as_planned(log) == expected_log(plan, "train")
        for call, launch in zip(collectives(log), planned, strict=True):
            assert isinstance(launch.work, Kernel)
            if launch not in shards:
                continue
            scatters, places = launch.work.name == "reduce_scatter", [plan.offsets[a.buffer] for a in launch.accesses]
            count = len(launch.operations)
            names = [plan.buffers[a.buffer].value or "" for a in launch.accesses]
            wholes = names[:count] if scatters else names[2 * count :]
            calls: list[str] = []
            for at, whole in enumerate(wholes):
                type_ = plan.graph.values[whole].type
                part = -(-type_.shape[0] // size) * type_.elements // type_.shape[0]
                source, to = places[at if scatters else 2 * at], places[(count if scatters else 2 * count) + at]
                if part * size == type_.elements:
                    kind = "reduce_scatter" if scatters else "all_gather"
                    calls.append(f"{kind} offsets={source},{to} integers={part},7{',0' if scatters else ''}")
                    continue
                for root in range(size):  # each gets, or gives, what its rows are
                    own = min(part, type_.elements - root * part)
                    first, last = (source + root * part * 4, to) if scatters else (source, to + root * part * 4)
                    kind, operation = ("reduce", ",0") if scatters else ("broadcast", "")
                    calls.append(f"{kind} offsets={first},{last} integers={own},7{operation},{root}")
            header = f"offsets={','.join(map(str, call.offsets))} integers={','.join(map(str, call.integers))}"
            assert header == calls[0].partition(" ")[2]
            assert [f"{name} {text}" for name, text in call.details if name != "memset"] == [*calls[1:], "group_end "]


@cache
def _rows() -> View:
    return view(plan_of_two())


def test_a_sum_that_is_being_enqueued_is_waited_for(tmp_path: Path) -> None:
    with loaded(compile_against_fake(_rows(), tmp_path), True, several_ranks=2) as (lib, module):
        for program in (lambda: lib.mbc_run_eager(module, 0), lambda: lib.mbc_capture(module)):
            lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
            lib.fake_nccl_says(3, 0)
            assert program() == 0, lib.mbc_last_error(module)
            log = lib.fake_log().decode()
            assert re.findall(r"detail polled (\d+)", log) == [str(COMMUNICATOR)] * 3
            # Nothing is launched between a sum and the end of its being enqueued.
            assert re.search(r"launch \d+ nccl [^\n]*\n(detail polled 77\n){3}", log)


def test_failures_of_nccl_name_the_bucket(tmp_path: Path) -> None:
    library = compile_against_fake(_rows(), tmp_path)
    number, _, _ = buckets(plan_of_two())[0]
    with loaded(library, True, several_ranks=2) as (lib, module):
        for polls in (0, 2):  # at once, or during a wait
            lib.fake_nccl_says(polls, 6)
            assert lib.mbc_run_eager(module, 0) == 1
            text = lib.mbc_last_error(module).decode()
            where = rf"launch {number}, sum\..*\(nccl all_reduce ctas=\d+\)"
            assert re.fullmatch(rf"{where}: NCCL: remote process exited", text)
        lib.fake_nccl_says(0, 0)
        assert lib.mbc_run_eager(module, 0) == 0
    with loaded(library, True) as (lib, module):
        assert lib.mbc_run_eager(module, 0) == 1
        text = lib.mbc_last_error(module).decode()
        assert text.endswith(": the plan is for several GPUs, and no communicator was given")


def test_the_module_keeps_its_own_copy(tmp_path: Path) -> None:
    """The module works although Python's struct of ranks is erased after mbc_create."""
    library = loaded(compile_against_fake(_rows(), tmp_path), True, several_ranks=2)
    with library as (lib, module):
        assert library.ranks is not None
        ctypes.memset(ctypes.byref(library.ranks), 0, ctypes.sizeof(library.ranks))
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        assert lib.mbc_run_eager(module, 0) == 0
        assert collectives(parse_log(lib.fake_log().decode()))


def test_python_and_cpp_have_one_struct_of_ranks() -> None:
    text = (folder("templates") / "include" / "mbc_module.h").read_text(encoding="utf-8")
    body = re.search(r"struct MbcRanks \{(.*?)\n\};", text, re.S)
    assert body is not None
    members = [
        (member, re.search(r"\(\*(\w+)\)\(| (\w+)$", member.strip())) for member in body.group(1).split(";")[:-1]
    ]
    fields = [
        (name[1] or name[2], ctypes.c_int64 if "int64_t" in member else ctypes.c_void_p)
        for member, name in members
        if name is not None
    ]
    assert fields == list(RanksInterface._fields_) and len(fields) == len(members)


def test_sources_of_a_rank_have_nccl(tmp_path: Path) -> None:
    write_sources(_rows(), "test", tmp_path / "source")
    assert (tmp_path / "source" / "nccl.cpp").is_file()
    assert "nccl" in _rows().libraries
    sources = [path.read_text(encoding="utf-8") for path in (tmp_path / "source").iterdir()]
    assert not any(re.search(r"#include .nccl\.h", text) for text in sources)  # nothing to install
