"""A custom backward pass is found wherever the model applies it."""

from __future__ import annotations

import gc
import random
from typing import Any, ClassVar

import numpy as np
import pytest

import mbc
from mbc.errors import MbcError
from tests.pytorch.nets import IMAGES, LABELS, Net, nn, torch, train_beside, trainer_of

checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
FakeTensor = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensor


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -gradient


def reversed_in_a_function(x: Any) -> Any:
    return Reverse.apply(x)


class Reversing(nn.Module):
    def helper(self, x: Any) -> Any:
        return reversed_in_a_function(x)

    def forward(self, x: Any) -> Any:
        return self.helper(x)


def in_a_branch(x: Any) -> Any:
    return x + reversed_in_a_function(x[:, :1]).tanh()


def checkpointed(x: Any) -> Any:
    return checkpoint(reversed_in_a_function, x, use_reentrant=True)


def checkpointed_anew(x: Any) -> Any:
    return checkpoint(reversed_in_a_function, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (Reversing(), "in 'body'"),
        (nn.Sequential(nn.ReLU(), Reversing()), "in 'body.1'"),
        (in_a_branch, "in the model itself"),
        (checkpointed, "in the model itself"),
        (checkpointed_anew, "in the model itself"),
    ],
    ids=["helper", "inner module", "branch", "reentrant checkpoint", "checkpoint"],
)
def test_an_own_backward_is_refused(body, place):
    with pytest.raises(MbcError) as caught:
        trainer_of(Net(body))
    assert caught.value.code == "MBC330" and "whose own backward mbc would not run" in caught.value.message
    assert f"test_own_backward.Reverse {place}" in caught.value.message


def twice_rectified(x: Any) -> Any:
    return checkpoint(lambda y: y.relu() * 2, x, use_reentrant=True)


def rectified(x: Any) -> Any:
    return checkpoint(torch.relu, x, use_reentrant=False)


@pytest.mark.parametrize("body", [twice_rectified, rectified])
def test_models_with_torch_checkpointing_are_trained_unchanged(body):
    train_beside(Net(body))


class CheckpointsItsNorm(Net):
    reentrant = False

    def forward(self, x: Any) -> Any:
        return self.head(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_within_a_checkpoint_change_once(reentrant):
    model, twin = CheckpointsItsNorm(nn.BatchNorm2d(8)), Net(nn.BatchNorm2d(8)).double()
    model.reentrant = reentrant
    with trainer_of(model, check=True) as trainer:
        trainer.step(IMAGES, LABELS)
    twin(IMAGES.double())
    torch.testing.assert_close(model.body.running_mean.double(), twin.body.running_mean, rtol=1e-6, atol=1e-7)
    assert int(model.body.num_batches_tracked) == 1


class CheckpointsItsInput(Net):
    def forward(self, x: Any) -> Any:
        return self.head(checkpoint(self.first, x, use_reentrant=True))


def test_a_checkpoint_that_torch_does_not_train_is_refused():
    with pytest.raises(MbcError, match=r"MBC330: torch.utils.checkpoint with use_reentrant=True has no input"):
        trainer_of(CheckpointsItsInput())


class Draws(Net):
    """A model that draws from every random generator and counts its calls."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm2d(8), nn.Dropout(0.5)))
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        random.random()
        np.random.rand()
        return super().forward(x)


def test_the_run_leaves_no_trace():
    model = Draws().train()
    states = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    trainer_of(model).close()
    after = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:] and model.calls == 0
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in states.items())
    assert all(parameter.grad is None for parameter in model.parameters()) and not model._forward_hooks


class Counted(Net):
    """A class that no other test uses."""


def test_the_weights_of_copies_are_freed_at_once():
    model = Counted()
    gc.collect()
    gc.disable()
    try:
        trainer = trainer_of(model, check=True)
        alive = [held for held in gc.get_objects() if type(held) is Counted and any(True for _ in held.parameters())]
    finally:
        gc.enable()
    assert len(alive) == 1 and alive[0] is model
    trainer.close()


def test_a_model_that_does_not_run_is_refused():
    with pytest.raises(MbcError, match=r"MBC330: "):
        trainer_of(Net(), example=torch.zeros(4, 2, 9, 11))
    assert IMAGES.shape[1] == 3


class Large(Net):
    """A network whose activations do not fit into memory."""

    def forward(self, x: Any) -> Any:
        if not x.is_meta and not isinstance(x, FakeTensor):
            raise torch.OutOfMemoryError("no memory")
        return super().forward(x)


class Reading(Net):
    """A network whose operations depend on numbers."""

    def forward(self, x: Any) -> Any:
        return super().forward(x if torch.compiler.is_exporting() or float(x.sum()) < 1e9 else -x)


def test_a_model_that_reads_numbers_is_searched_too():
    mbc.module(Reading(), IMAGES, device="cpu", fallback="error", progress=False, check=False)
    with pytest.raises(MbcError, match=r"autograd\.Function.*Reverse in 'body'"):
        mbc.module(Reading(Reversing()), IMAGES, device="cpu", fallback="error", progress=False)


class Caching(Net):
    """A network that makes a tensor once, for all calls and copies."""

    cache: ClassVar[list[Any]] = []

    def forward(self, x: Any) -> Any:
        if not self.cache:
            self.cache.append(torch.full(x.shape[2:], 2.0, device=x.device))
        return super().forward(x * self.cache[0])


def test_tensors_that_a_model_keeps_have_numbers():
    mbc.module(Caching(), IMAGES, device="cpu", fallback="error", progress=False)
    assert type(Caching.cache[0]) is torch.Tensor and (Caching.cache[0] == 2).all()


def test_a_model_that_only_a_plan_can_train_is_planned():
    mbc.module(Large(), IMAGES, device="cpu", fallback="error", progress=False, check=False)
    with pytest.raises(MbcError, match=r"autograd\.Function.*Reverse in 'body'"):
        mbc.module(Large(Reversing()), IMAGES, device="cpu", fallback="error", progress=False)
