"""Divided operations one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mbc.equivalence.calls import pairs
from mbc.equivalence.operations import OnCpu, compare_operation, random_operands
from mbc.ir.types import Precision
from mbc.measure.gemm_trial import TOLERANCES
from mbc.measure.gpu import DoesNotFit
from mbc.plan.model import Rows
from tests.runtime.nets import small_plan


def operation_pairs(precision="fp32", micro_batch=4):
    return pairs(small_plan(precision, micro_batch), small_plan(precision))


def test_each_distinct_divided_operation_once():
    distinct_pairs = operation_pairs()
    forward = {"first", "infer.first", "second", "infer.second"}
    backward = {"first.backward_filter", "second.backward_data", "second.backward_filter"}
    names = [name for pair in distinct_pairs for name in pair.names]
    assert set(names) == forward | backward and len(names) == 7
    assert ("first", "infer.first") in [pair.names for pair in distinct_pairs]
    for pair in distinct_pairs:
        assert [call.first_row for call in pair.divided] == [0, 4]
        assert [call.request.inputs[0].shape[0] for call in pair.divided] == [4, 2]
        assert [call.request.inputs[0].shape[0] for call in pair.undivided] == [6]
        assert [call.accumulate for call in pair.divided] == [False, "filter" in pair.names[0]]


def test_a_plan_that_is_not_divided_has_none():
    assert pairs(small_plan(), small_plan()) == ()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp64"])
def test_slices_give_the_result_of_the_whole(precision):
    for pair in operation_pairs(precision):
        comparison = compare_operation(OnCpu(), pair, seed=1)
        assert comparison.passed and comparison.tolerance == TOLERANCES[Precision(precision)], pair.names


@pytest.mark.parametrize(
    "spoil",
    [
        lambda calls: calls[:1],  # the last slice is lost
        lambda calls: (calls[0], dataclasses.replace(calls[1], rows=(Rows(0, 2), Rows(0, 1), Rows(4, 6)))),
    ],
)
def test_a_lost_or_misplaced_slice_is_seen(spoil):
    pair = next(pair for pair in operation_pairs() if pair.names[0] == "second")
    assert not compare_operation(OnCpu(), dataclasses.replace(pair, divided=spoil(pair.divided)), seed=1).passed


def test_a_sum_that_is_overwritten_is_seen():
    pair = next(pair for pair in operation_pairs() if "filter" in pair.names[0])
    overwriting = tuple(dataclasses.replace(call, accumulate=False) for call in pair.divided)
    assert not compare_operation(OnCpu(), dataclasses.replace(pair, divided=overwriting), seed=1).passed


def with_kernels(pair, *names):
    """Return the pair with measured calls of these kernels; the last kernel is the undivided one."""
    *ours, theirs = [
        dataclasses.replace(call, candidate=dataclasses.replace(call.candidate, name=name, measured=True))
        for call, name in zip((*pair.divided, *pair.undivided), names, strict=True)
    ]
    return dataclasses.replace(pair, divided=tuple(ours), undivided=(theirs,))


def test_one_measured_algorithm_in_fp32_is_held_to_more():
    pair = operation_pairs()[0]
    assert compare_operation(OnCpu(), with_kernels(pair, "a", "a", "a"), 0).tolerance == 1e-6
    assert compare_operation(OnCpu(), with_kernels(pair, "a", "a", "b"), 0).tolerance == 5e-6
    assert compare_operation(OnCpu(), pair, 0).tolerance == 5e-6  # estimated: chosen when it is built
    assert compare_operation(OnCpu(), pair, 0, tolerance=0.0).tolerance == 0.0
    half = with_kernels(operation_pairs("bf16")[0], "a", "a", "a")
    assert compare_operation(OnCpu(), half, 0).tolerance == TOLERANCES[Precision.BF16]


def test_what_does_not_fit_is_left_out():
    class Full:
        def run(self, pair, calls, operands):
            raise DoesNotFit("no room")

    comparison = compare_operation(Full(), operation_pairs()[0], 0)
    assert comparison.distance is None and comparison.passed


def test_operands_are_as_they_are_stored():
    operands = random_operands(operation_pairs("bf16")[0], 0)
    assert [o.shape for o in operands] == [t.shape for t in operation_pairs("bf16")[0].request.inputs]
    for operand in operands:
        assert operand.dtype == np.float32 and not (operand.view(np.uint32) & 0xFFFF).any()
        assert 0.5 < operand.std() < 1.5
