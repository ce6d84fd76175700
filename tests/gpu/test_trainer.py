"""`mbc.from_torch` on a GPU: the model's tensors are the plan's, and steps have PyTorch's numbers in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

import mbc
from mbc.hardware.streams import Space
from mbc.measure.gpu import Gpu
from tests.gpu.test_planned_module import exact as exact

torch: Any = pytest.importorskip("torch")
loops: Any = pytest.importorskip("tests.pytorch.test_planned_module")
F = torch.nn.functional


@pytest.fixture(params=["cuda", "cpu"])
def pair(request: pytest.FixtureRequest, gpu: Gpu) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Return a model with its trainer, which began on a device, and a model of PyTorch with its optimizer."""
    theirs, ours = loops.normed().cuda(), loops.normed().to(request.param)
    optimizer = loops.sgd(ours)
    given = {"loss": "softmax_cross_entropy", "optimizer": optimizer, "device": "cuda", "measure_for": "1s"}
    with mbc.from_torch(ours, loops.X, progress=False, **given) as trainer:
        yield ours, trainer, theirs, loops.sgd(theirs)
    assert {str(tensor.device).partition(":")[0] for tensor in ours.state_dict().values()} == {request.param}


def compare(pair: Any, steps: int = 3) -> None:
    ours, trainer, theirs, optimizer = pair
    for x, labels in loops.batches(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(theirs(x), labels)
        loss.backward()
        optimizer.step()
        assert float(trainer.step(x, labels)) == pytest.approx(loss.item(), rel=2e-3)
    for (name, one), wanted in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one.cuda(), wanted, rtol=2e-3, atol=2e-4, msg=name)


def test_readers_see_trained_tensors_and_writers_change_them(pair: Any):
    ours, _, theirs, _ = pair
    held = ours.first.weight
    compare(pair)
    assert held is ours.first.weight and torch.equal(copy.deepcopy(ours).first.weight, held)
    for model in (ours, theirs):
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        model.head[-1].weight.data = 2 * model.head[-1].weight.data
    compare(pair)
    assert held is ours.first.weight and held.is_cuda


def test_a_training_goes_back_to_its_checkpoint_and_on_in_torch(pair: Any):
    ours, trainer, theirs, optimizer = pair
    compare(pair, 1)
    models = (ours, trainer._optimizer), (theirs, optimizer)
    kept = [copy.deepcopy((model.state_dict(), other.state_dict())) for model, other in models]
    compare(pair)
    for (weights, state), (model, other) in zip(kept, models, strict=True):
        model.load_state_dict(weights)
        other.load_state_dict(state)
    compare(pair)
    for one, wanted in zip(trainer._optimizer.state.values(), optimizer.state.values(), strict=True):
        assert one["momentum_buffer"].is_cuda
        torch.testing.assert_close(one["momentum_buffer"], wanted["momentum_buffer"], rtol=2e-3, atol=2e-4)
    trainer.close()
    trainer._optimizer.step()


def test_moments_in_host_memory(gpu: Gpu):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(297, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 5)
    )
    theirs = copy.deepcopy(model).cuda()
    one, two = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (model, theirs))
    given = {"loss": "softmax_cross_entropy", "device": "cuda", "measure_for": "1s", "progress": False}
    with mbc.from_torch(model, loops.X, optimizer=one, **given) as trainer:
        predicted = trainer.module.plan.predictions
    memory = predicted.arena_bytes + predicted.overhead_bytes - (1 << 20)
    with mbc.from_torch(model, loops.X, optimizer=one, memory=memory, **given) as trainer:
        assert Space.HOST in {place.space for place in trainer.module.places.values()}
        compare((model, trainer, theirs, two))
        kept = copy.deepcopy(one.state_dict())
        for own, wanted in zip(kept["state"].values(), two.state_dict()["state"].values(), strict=True):
            assert own["step"] == wanted["step"] == 3
            torch.testing.assert_close(own["exp_avg"].cuda(), wanted["exp_avg"], rtol=2e-3, atol=2e-5)
        compare((model, trainer, theirs, two), 1)
        one.load_state_dict(kept)
        two.load_state_dict(copy.deepcopy(kept))
        compare((model, trainer, theirs, two))
    assert {str(value.device) for value in one.state[next(model.parameters())].values()} == {"cpu"}


def test_steps_on_a_stream_of_its_own(pair: Any):
    with torch.cuda.stream(torch.cuda.Stream()):
        compare(pair)


def test_the_memory_of_the_plan_is_freed(gpu: Gpu):
    model = loops.normed().cuda()
    before = torch.cuda.memory_allocated()
    trainer = mbc.from_torch(model, loops.X, loss="softmax_cross_entropy", optimizer=loops.sgd(model), device="cuda",
                             progress=False, measure_for="1s")  # fmt: skip
    arena_bytes = trainer.module.memory.arena_taken
    assert torch.cuda.memory_allocated() - before >= arena_bytes > 0
    weight = model.first.weight
    trainer.close()
    assert torch.cuda.memory_allocated() - before < arena_bytes
    assert weight is model.first.weight and torch.isfinite(weight).all()
