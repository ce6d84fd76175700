"""Checks of single launches: correct launches pass, and an error in one launch is found in that launch alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.equivalence import launches
from mbc.equivalence.float64 import Array
from mbc.equivalence.launches import Checked, check_launches
from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, Precision
from mbc.options import Options
from mbc.plan.model import Access, Copy, Mode, Plan
from mbc.runtime.cpu import Interpreter
from mbc.runtime.formats import canonical_view, load, store
from mbc.runtime.shadow import access_region
from mbc.source import Source
from tests.optimize.search.test_select_relu_masks import Measured, planned, table
from tests.runtime.nets import same_shape_plan, small_plan
from tests.runtime.test_interpreter import offloaded_plan

Spoil = Callable[[Array], None]  # changes a canonical array


def masked_plan() -> Plan:
    """Return a plan whose ReLUs leave bit masks; some are fused with batch norms and residual sums."""
    return planned(table(Measured(), "bf16"))


def offloading_plan() -> Plan:
    return offloaded_plan()


def launches_of(plan: Plan, kind: str) -> list[int]:
    """Return the launches of the training program that run an operation of this kind."""
    kinds = {operation.name: operation.kind for operation in plan.graph.train}
    return [i for i, launch in enumerate(plan.train.launches) if kind in [kinds[name] for name in launch.operations]]


def output(plan: Plan, index: int, value: str) -> Access:
    accesses = plan.train.launches[index].accesses
    return next(a for a in accesses if a.mode is not Mode.READ and plan.buffers[a.buffer].value == value)


def spoiled(monkeypatch: pytest.MonkeyPatch, plan: Plan, index: int, access: Access, spoil: Spoil) -> Checked:
    """Return the result of the check if launch `index` of the training program leaves a spoiled value."""
    run_launch = Interpreter.run_launch
    buffer, region = plan.buffers[access.buffer], access_region(plan, access)

    def run(self: Interpreter, name: str, number: int) -> None:
        run_launch(self, name, number)
        if (name, number) == ("train", index):
            value = plan.graph.values[buffer.value or ""]
            shape = value.type.with_rows(access.rows.count).shape if value.per_sample else value.type.shape
            data = self.space(region.space)[region.start : region.stop]
            view = canonical_view(data, shape, buffer.dtype, buffer.layout)
            array = np.array(load(view, buffer.dtype))
            spoil(array)
            store(view, buffer.dtype, array)

    monkeypatch.setattr(Interpreter, "run_launch", run)
    return check_launches(plan, "cpu", 2, 0)


def failing(checked: Checked) -> list[tuple[str, int]]:
    return [(launch.program, launch.index) for launch in checked.launches if not launch.passed]


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_every_launch_of_both_programs_passes(precision: Precision, micro_batch: int):
    plan = small_plan(precision.value, 0 if precision is Precision.FP64 else micro_batch)
    checked = check_launches(plan, "cpu", 2, 0)
    assert checked.passed and checked.device == "cpu" and checked.reference == "NumPy in float64"
    both = [(program, i) for program in ("train", "infer") for i in range(len(getattr(plan, program).launches))]
    assert [(launch.program, launch.index) for launch in checked.launches] == both
    for launch, (program, index) in zip(checked.launches, both, strict=True):
        accesses = getattr(plan, program).launches[index].accesses
        written = [plan.buffers[a.buffer].value for a in accesses if a.mode is not Mode.READ]
        assert [o.value for o in launch.outputs] == [name for name in written if name is not None]
        assert all(o.elements > 0 for o in launch.outputs)


@pytest.mark.parametrize("make", [masked_plan, same_shape_plan, offloading_plan], ids=["masks", "mse", "offloading"])
def test_masks_and_copies_pass(make: Callable[[], Plan]):
    plan = make()
    checked = check_launches(plan, "cpu", 2, 0)
    assert checked.passed
    kinds = {launch.kind for launch in checked.launches}
    if make is masked_plan:
        assert any("relu_mask" in kind for kind in kinds)
    if make is offloading_plan:
        copies = sum(isinstance(launch.work, Copy) for p in (plan.train, plan.infer) for launch in p.launches)
        assert copies and copies == sum(launch.kernel == "copy" for launch in checked.launches)


def one_element(array: Array) -> None:
    """Change the sign of the largest element."""
    at = np.unravel_index(np.argmax(np.abs(array)), array.shape)
    array[at] = -array[at]


def one_bit(array: Array) -> None:
    array.flat[array.size // 2] ^= 8


def swapped(array: Array) -> None:
    """Exchange the first two channels."""
    array[:, [0, 1]] = array[:, [1, 0]]


def one_statistic(array: Array) -> None:
    array[1] *= 1.001


MUTANTS: list[tuple[str, str, str, Spoil]] = [
    ("fp32", "convolution", "second", one_element),
    ("bf16", "convolution", "second", one_element),
    ("fp32", "convolution", "second", swapped),
    ("bf16", "convolution", "second", swapped),
    ("fp32", "batch_statistics", "bn0.variance", one_statistic),
    ("bf16", "batch_statistics", "bn0.variance", one_statistic),
    ("fp32", "batch_normalize_backward_reduce", "d.bn0.bias", one_element),
    ("bf16", "batch_normalize_backward_reduce", "d.bn0.bias", one_element),
    ("bf16", "max_pool", "maxpool0.index", one_bit),
    ("bf16", "dropout", "dropout0", one_element),
    ("fp32", "convolution_backward_filter", "d.first.weight", one_element),
    ("bf16", "convolution_backward_filter", "d.first.weight", one_element),
    ("bf16", "convolution_backward_filter", "d.first.weight", swapped),
    ("fp32", "guard", "next.control", one_bit),
    ("fp32", "sgd_update", "next.head.weight.momentum", one_element),
    ("fp32", "update_running", "next.bn0.running_var", one_statistic),
    ("bf16", "softmax_cross_entropy", "softmax_cross_entropy0", one_element),
]  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "kind", "value", "spoil"),
    MUTANTS,
    ids=[f"{precision}-{value}-{spoil.__name__}" for precision, _, value, spoil in MUTANTS],
)
def test_a_fault_is_found_where_it_is(
    monkeypatch: pytest.MonkeyPatch, precision: str, kind: str, value: str, spoil: Spoil
):
    plan = small_plan(precision)
    index = next(i for i in launches_of(plan, kind) if value in written_by(plan, i))
    checked = spoiled(monkeypatch, plan, index, output(plan, index, value), spoil)
    assert failing(checked) == [("train", index)]
    worst = checked.worst[0]
    assert plan.train.launches[index].operations[0] in worst.name
    assert [o.value for o in worst.outputs if not o.passed] == [value]


def written_by(plan: Plan, index: int) -> list[str | None]:
    return [plan.buffers[a.buffer].value for a in plan.train.launches[index].accesses if a.mode is not Mode.READ]


def test_one_bit_of_a_mask_is_found(monkeypatch: pytest.MonkeyPatch):
    plan = masked_plan()
    for index in launches_of(plan, "relu_mask"):
        value = next(v for v in written_by(plan, index) if v is not None and v.endswith(".mask"))
        checked = spoiled(monkeypatch, plan, index, output(plan, index, value), one_bit)
        monkeypatch.undo()
        assert failing(checked) == [("train", index)]
        (wrong,) = [o for o in checked.worst[0].outputs if not o.passed]
        assert (wrong.value, wrong.wrong) == (value, 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_forgotten_residual_sum_is_found(monkeypatch: pytest.MonkeyPatch, precision: str):
    """The launch writes its first operand in place of the sum."""
    plan = small_plan(precision)
    (index, *_) = launches_of(plan, "add")
    source = plan.train.launches[index].accesses[0]
    kept: list[Array] = []
    run_launch = Interpreter.run_launch
    region = access_region(plan, source)

    def run(self: Interpreter, name: str, number: int) -> None:
        if (name, number) == ("train", index):
            kept[:] = [self.space(region.space)[region.start : region.stop].copy()]
        run_launch(self, name, number)

    monkeypatch.setattr(Interpreter, "run_launch", run)
    access = output(plan, index, "add0")
    buffer = plan.buffers[source.buffer]

    def forget(array: Array) -> None:
        array[...] = load(canonical_view(kept[0], array.shape, buffer.dtype, buffer.layout), buffer.dtype)

    assert failing(spoiled(monkeypatch, plan, index, access, forget)) == [("train", index)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_launch_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch, precision: str):
    """Each launch in turn writes nothing, except conversions and updates that would not change their values."""
    plan = small_plan(precision)
    run_launch = Interpreter.run_launch
    missed: list[int] = []
    for index, launch in enumerate(plan.train.launches):

        def run(self: Interpreter, name: str, number: int, index: int = index) -> None:
            if (name, number) == ("train", index):
                for access in plan.train.launches[index].accesses:
                    if access.mode is Mode.WRITE:
                        region = access_region(plan, access)
                        self.space(region.space)[region.start : region.stop] = 0
                return
            run_launch(self, name, number)

        monkeypatch.setattr(Interpreter, "run_launch", run)
        failures = failing(check_launches(plan, "cpu", 2, 0))
        if ("train", index) not in failures:
            missed.append(index)
        assert launch.accesses
    assert not missed


def test_a_slice_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch):
    """A slice of the mini-batch overwrites a filter gradient to which it should add."""
    plan = small_plan("bf16", 2)
    adding = [
        i for i in launches_of(plan, "convolution_backward_filter")
        if any(a.mode is Mode.ACCUMULATE for a in plan.train.launches[i].accesses)
    ]  # fmt: skip
    index = adding[-1]
    access = next(a for a in plan.train.launches[index].accesses if a.mode is Mode.ACCUMULATE)
    run_launch = Interpreter.run_launch
    region = access_region(plan, access)

    def run(self: Interpreter, name: str, number: int) -> None:
        if (name, number) == ("train", index):
            self.space(region.space)[region.start : region.stop] = 0
        run_launch(self, name, number)

    monkeypatch.setattr(Interpreter, "run_launch", run)
    checked = check_launches(plan, "cpu", 2, 0)
    assert failing(checked) == [("train", index)] and checked.worst[0].divided


POOLED = """
network pooled(batch = 8, classes = 5) {
  input image[batch, 8, 32, 32] : float
  input target[batch] : class
  x = image |> conv(32, 3, pad=1) |> bn |> relu |> maxpool(3, stride=2, pad=1)
  logits = x |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_pooled_values_may_be_rounded_to_the_other_side(precision: str):
    """A few of many elements may differ, because rounding before the pool chooses another one; none is far off."""
    plan = compile_plan(Source("pooled.mbc", POOLED), Options(gpu="h200", settings=(("train.precision", precision),)))
    checked = check_launches(plan, "cpu", 2, 0)
    pooled = [launch for launch in checked.launches if launch.kind.endswith("batch_normalize+relu+max_pool")]
    assert checked.passed and pooled and all(launch.outputs[0].element < 2 for launch in pooled)


def test_large_launches_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch):
    plan = small_plan("bf16")
    whole = check_launches(plan, "cpu", 2, 0)
    monkeypatch.setattr(launches.InNumpy, "chunk_bytes", 1)
    parts = check_launches(plan, "cpu", 2, 0)
    assert parts.passed
    for one, other in zip(whole.launches, parts.launches, strict=True):
        for ours, theirs in zip(one.outputs, other.outputs, strict=True):
            assert (ours.elements, ours.differing) == (theirs.elements, theirs.differing)
            assert ours.relative == pytest.approx(theirs.relative, rel=1e-6, abs=1e-12)


def test_a_step_that_does_not_count_is_said(monkeypatch: pytest.MonkeyPatch):
    plan = small_plan()
    values = dict(plan.graph.values)
    poisoned = {name: np.full(values[name].type.shape, np.nan, np.float32) for name in ("image",)}
    drawn = launches.random_inputs
    monkeypatch.setattr(launches, "random_inputs", lambda *about: {**drawn(*about), **poisoned})
    with pytest.raises(MbcError) as caught:
        check_launches(plan, "cpu", 2, 0)
    assert caught.value.code == "MBC197"
    assert caught.value.message == "the loss of step 1 is nan, so there is nothing to compare"


def test_launches_without_enough_memory_are_compared_in_smaller_parts(monkeypatch: pytest.MonkeyPatch):
    plan = small_plan("bf16")
    load = launches.InNumpy.load
    rows: list[int] = []

    def scarce(most: int) -> None:
        def loading(self: launches.InNumpy, data: Array, shape: tuple[int, ...], dtype: DType, layout: Layout) -> Array:
            if len(shape) == 4 and shape[1:] == (2, 6, 6):
                rows.append(shape[0])
                if shape[0] > most:
                    raise MemoryError
            return load(self, data, shape, dtype, layout)

        monkeypatch.setattr(launches.InNumpy, "load", loading)

    scarce(1)
    assert check_launches(plan, "cpu", 1, 0).passed
    assert set(rows) == {1, 6}
    scarce(0)
    with pytest.raises(MbcError) as caught:
        check_launches(plan, "cpu", 1, 0)
    assert caught.value.code == "MBC250"
    assert caught.value.message == (
        "the operands of 'bf16.image' in float64 take more memory than is free beside the arena"
    )
