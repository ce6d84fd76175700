from __future__ import annotations

import pytest

from mbc.plan.live import Kind, kinds_of_values, lifetimes
from mbc.plan.memory import memory_curve
from tests.plan.chains import naive_live_bytes, random_plan


@pytest.mark.parametrize("seed", range(15))
def test_live_bytes_and_curves(seed):
    plan = random_plan(seed)
    most = [memory_curve(plan, program).peak_bytes for program in (plan.train, plan.infer)]
    assert max(most) == naive_live_bytes(plan)
    for program, live in zip((plan.train, plan.infer), most, strict=True):
        curve = memory_curve(plan, program)
        assert len(curve.total_bytes) == len(program.launches)
        assert max(curve.total_bytes) == curve.total_bytes[curve.peak_launch] == live
        assert sum(curve.at(curve.peak_launch).values()) == live
        states = curve.bytes_by_kind[Kind.PARAMETERS]
        assert len(set(states)) == 1  # all the time


def test_kinds():
    kinds = kinds_of_values(random_plan(1).graph)
    assert kinds["l0.weight"] is kinds["l0.weight.next"] is Kind.PARAMETERS
    assert kinds["control.next"] is Kind.CONTROL
    assert kinds["image"] is kinds["target"] is Kind.INPUTS
    assert kinds["r0"] is kinds["i.r0"] is kinds["loss"] is kinds["correct"] is Kind.ACTIVATIONS
    assert kinds["d.r0"] is kinds["d.l0.weight"] is Kind.GRADIENTS


def test_lifetimes_are_half_open():
    plan = random_plan(2)
    lives = lifetimes(plan.train)
    for buffer, (start, stop) in lives.items():
        touched = [i for i, x in enumerate(plan.train.launches) if any(a.buffer == buffer for a in x.accesses)]
        if buffer not in plan.train.entry and buffer not in plan.train.exit:
            assert (start, stop) == (touched[0], touched[-1] + 1)
    assert all(lives[buffer][1] == len(plan.train.launches) for buffer in plan.train.exit)
