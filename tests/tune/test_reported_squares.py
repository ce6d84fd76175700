"""The squared norms that a step reports are those of the gradients of its parts, and of the mean gradient."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mbc.compiler import compile_plan, compile_plans
from mbc.errors import MbcError
from mbc.ir.metrics import MEAN_SQUARE, PART_SQUARE
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.source import Source
from tests.runtime.test_ranks import SOURCE, own, rows
from tests.train.threads import ThreadRank, run_ranks

TEXT = (SOURCE % "").replace("sgd(momentum=0.9, weight_decay=1e-4)", "sgd")
PART_ROWS = 4


@cache
def plans_of(ranks: int, accumulate: int, precision: str = "fp64", more: str = "") -> tuple[Plan, ...]:
    """Return plans for parts of PART_ROWS rows. A plan of a single part has no noise scale."""
    settings = (
        ("batch", str(PART_ROWS * ranks)), ("train.precision", precision), ("train.accumulate", str(accumulate)),
        ("train.noise_scale", str(ranks * accumulate > 1).lower()),
        *([("train.shard_optimizer", more)] if more else ()),
    )  # fmt: skip
    options = Options(gpu="h200", gpus=ranks, settings=settings)
    return (
        compile_plans(Source("net.mbc", TEXT), options)
        if ranks > 1
        else (compile_plan(Source("net.mbc", TEXT), options),)
    )


def gradients(image: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Return the gradients of all parameters in parts of PART_ROWS rows, [parts, elements], from a step at rate 1."""
    differences: list[np.ndarray] = []
    for start in range(0, len(label), PART_ROWS):
        net = Module(plans_of(1, 1)[0], seed=3, device="cpu", shadow=False)
        before = net.state_dict()
        net.step(image[start : start + PART_ROWS], label[start : start + PART_ROWS], lr=1.0)
        after = net.state_dict()
        differences.append(np.concatenate([(before[name] - after[name]).ravel() for name in before]))
    return np.array(differences)


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 2), (1, 3), (2, 1), (2, 2)])
def test_they_are_those_of_the_gradients(ranks: int, accumulate: int):
    plans = plans_of(ranks, accumulate)
    image, label = rows(7, PART_ROWS * ranks * accumulate)

    def body(member: ThreadRank) -> dict[str, float]:
        with Module(plans[0], seed=3, device="cpu", ranks=member if ranks > 1 else None) as net:
            net.step(*own(net.plan, member.rank, (image, label)), lr=0.1)
            return dict(net.metrics)

    parts = gradients(image, label)
    for squares in run_ranks(ranks, body):
        assert squares[PART_SQUARE] == pytest.approx(float((parts**2).sum(axis=1).mean()), rel=1e-9)
        assert squares[MEAN_SQUARE] == pytest.approx(float((parts.mean(axis=0) ** 2).sum()), rel=1e-9)


def test_sharded_states_do_not_change_them():
    """If mbc may choose, states stay whole, and the norm is that of whole gradients."""
    assert plans_of(2, 2)[0].graph.metrics == plans_of(2, 2, more="auto")[0].graph.metrics
    with pytest.raises(MbcError, match="MBC101: the optimizer's states cannot be sharded: noise_scale needs norms"):
        plans_of(2, 2, more="true")


def test_one_part_tells_nothing():
    source = Source("net.mbc", TEXT)
    for options, why in (
        (Options(gpu="h200", settings=(("train.noise_scale", "true"),)), "one mini-batch of one GPU is one part"),
        (Options(gpu="h200", gpus=3, settings=(("train.noise_scale", "true"),)), "different numbers of rows"),
    ):
        with pytest.raises(MbcError, match=f"MBC310: noise_scale needs gradients of two or more equal parts.*{why}"):
            compile_plans(source, options)
