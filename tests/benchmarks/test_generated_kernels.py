"""Which requests benchmarks/generated_kernels.py chooses, and what its worker does, on a simulated GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import generated_kernels
from generated_kernels import (
    chosen,
    difference,
    in_precision,
    is_generated,
    kernels_of,
    launches_of,
    moved_bytes,
    row_of,
)
from kernel_worker import GENERATED, Launches
from modules import example

from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import KERNELS
from mbc.measure import clock as clocks
from mbc.ops.base import NoAttributes
from mbc.profile.signature import read_signature, signature
from tests.measure.test_harness import Kernels, Memory, bench_of

IMAGE = TensorType((4, 8, 4, 4), DType.BF16)


def _relu(rows: int) -> Request:
    image = IMAGE.with_rows(rows)
    return Request("relu", NoAttributes(), (image,), (image,), Precision.BF16)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(clocks, "Graph", lambda gpu, body: SimpleNamespace(launch=body, close=lambda: None))
    gpu = Memory()
    return Launches(bench_of(gpu, Kernels(gpu)))


def test_memory_bound_kernels_of_a_plan_are_chosen_with_their_layouts_and_precisions() -> None:
    plan = replace(example("digits", ("train.precision", "bf16")), gpu="h200").plan()
    kernels = {kernel.name for kernel, _ in kernels_of(plan)}
    assert kernels and all(KERNELS[name].file.startswith(generated_kernels.FOLDERS) for name in kernels)
    requests = chosen(kernels_of(plan))
    assert {about["kernel"] for about in requests.values()} == kernels
    rows = launches_of(requests)
    assert {name.split()[2] for name in rows} == {"bf16", "fp16", "fp32"}
    assert {launch[0] for launch in rows.values() if is_generated(launch[1])} >= {"channel_sum"}
    for kernel, request, layouts in rows.values():
        assert any([*map(str, orders)] == layouts for orders in KERNELS[kernel].layouts(request))


def test_of_each_kernel_the_largest_request_and_the_one_in_the_middle_are_chosen() -> None:
    requests = chosen((KERNELS["relu"], _relu(rows)) for rows in (2, 8, 1, 4, 8))
    large, middle = requests
    assert (large, middle) == ("relu 64x256x56x56", "relu 4x8x4x4"), "of 64x256x56x56 and 8, 4, 2 and 1 rows"
    assert [name for name, about in requests.items() if about["largest"]] == [large]
    names = list(launches_of(requests))
    assert len(names) == 2 * 2 + 2 * 2 and names[0] == f"{large} bf16 channels_first"


def test_a_request_keeps_the_types_that_do_not_depend_on_the_precision() -> None:
    vector = TensorType((8,), DType.FP32)
    request = Request("bias_add", NoAttributes(), (IMAGE, vector), (IMAGE,), Precision.BF16)
    assert in_precision(request, Precision.FP16).inputs == (replace(IMAGE, dtype=DType.FP16), vector)
    assert moved_bytes(in_precision(request, Precision.FP32)) == 2 * 4 * 512 + 32
    assert read_signature(signature(in_precision(request, Precision.FP32))).precision is Precision.FP32


@pytest.mark.parametrize("layout", Layout)
def test_the_worker_launches_and_times_every_kernel_on_the_same_operands(launches: Launches, layout: Layout) -> None:
    layouts = (layout.value,) * 2
    answers = launches.answer(open=signature(_relu(4)), layouts=layouts, kernels=["relu", "tanh", GENERATED])
    assert answers["tanh"] == {"refused": "no such kernel takes the request in these layouts"}
    sample = answers["relu"]["sample"]
    assert answers[GENERATED]["kernel"].startswith("map_") and answers[GENERATED]["sample"] == sample
    assert len(sample) == 1 and len(sample[0]) == 512 and min(sample[0]) == 0 < max(sample[0])
    assert launches.answer(time="relu", budget_us=1000.0) == 2000.0
    again = launches.answer(open=signature(_relu(4)), layouts=layouts, kernels=["relu"])
    assert difference(sample, again["relu"]["sample"]) == 0 and "tanh" not in again


def test_generated_kernels_of_a_precision_are_compiled_together() -> None:
    expected: list[list[Request]] = []
    requests = [
        in_precision(_relu(rows), precision) for rows in (2, 4) for precision in (Precision.BF16, Precision.FP32)
    ]
    worker = Launches(SimpleNamespace(expect=expected.append))  # pyright: ignore[reportArgumentType]
    worker.answer(expect=[signature(request) for request in requests])
    assert sorted(len(group) for group in expected) == [2, 2]
    assert all(len({request.precision for request in group}) == 1 for group in expected)


class Process:
    """A worker without a GPU."""

    def __init__(self, times: dict[str, float], sample: float) -> None:
        """Take these times, and outputs of this value."""
        self.times, self.sample = times, sample

    def ask(self, **request: Any) -> Any:
        """Answer as `Launches` does."""
        if "time" in request:
            return self.times[request["time"]]
        return {name: self._opened(name) for name in request["kernels"]}

    def _opened(self, name: str) -> dict[str, Any]:
        kernel = "map_0123" if name == GENERATED else name
        return {"kernel": kernel, "sample": [[self.sample]]} if name in self.times else {"refused": "no kernel"}


@pytest.mark.parametrize("together", [True, False])
def test_a_row_compares_both_kernels_of_one_checkout_or_of_two(together: bool) -> None:
    both = Process({"relu": 10.0, GENERATED: 9.0}, 1.0)
    hand, generated = (both, both) if together else (Process({"relu": 10.0}, 1.0), Process({GENERATED: 9.0}, 1.5))
    row = row_of("relu", _relu(4), ("nchw",) * 2, (hand, generated), 20)
    assert row["ratio"] == pytest.approx(0.9) and row["rounds"] == 20 and row["generated"] == "map_0123"
    assert row["hand_gb_s"] == pytest.approx(2048 / 10 / 1e3)
    assert row["difference"] == (0 if together else pytest.approx(0.5))
    lacking = row_of("relu", _relu(4), ("nchw",) * 2, (hand, Process({"relu": 10.0}, 1.0)), 20)
    assert lacking == {"refused": {GENERATED: "no kernel"}}
    rows = [{"name": "relu a", **row}, {"name": "relu b", "ratio": 1.1}, {"name": "tanh a", **lacking}]
    assert generated_kernels.by_kernel(rows) == [{"name": "relu", "requests": 2, "ratio": 1.0, "largest_ratio": 1.1}]
