"""`mbc.from_torch` on a GPU: PyTorch's tensors are the plan's, with PyTorch's numbers in float32."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

import mbc
from mbc.measure.gpu import Gpu

torch: Any = pytest.importorskip("torch")
states: Any = pytest.importorskip("tests.pytorch.test_optimizer_states")
own_loss: Any = pytest.importorskip("tests.pytorch.test_own_loss")
GIVEN = {"device": "cuda", "precision": "fp32", "measure_for": "1s"}
test_a_training_goes_back_to_its_checkpoint_and_on_in_torch = (
    states.test_a_training_goes_back_to_its_checkpoint_and_on_in_torch
)
test_a_changed_state_counts_from_the_next_step_on = states.test_a_changed_state_counts_from_the_next_step_on
test_a_step_that_is_skipped_does_not_count = states.test_a_step_that_is_skipped_does_not_count
test_small_gradients_survive_in_fp16 = own_loss.test_small_gradients_survive_in_fp16
test_states_in_host_memory_are_shared_too = states.test_states_in_host_memory_are_shared_too


@pytest.fixture(autouse=True, params=["cuda", "cpu"])
def on_the_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, gpu: Gpu) -> None:
    for name, value in {"GIVEN": GIVEN, "EXACT": 2e-3, "START": request.param}.items():
        monkeypatch.setattr(states, name, value)
    monkeypatch.setattr(own_loss, "trainer_of", partial(own_loss.trainer_of, device="cuda", measure_for="1s"))
    for switch in (torch.backends.cudnn, torch.backends.cuda.matmul):
        monkeypatch.setattr(switch, "allow_tf32", False)


def test_readers_see_trained_weights_and_changes_count():
    pair = states.Pair(states.sgd)
    held = pair.ours.first.weight
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for model, _ in pair.both():
                with torch.no_grad():
                    model.first.weight.mul_(0.5)
                model.head[-1].weight.data = 2 * model.head[-1].weight.data
            pair.step()
            pair.step()
            trained = torch.from_numpy(pair.trainer.module.state("first.weight"))
            for weight in (held, copy.deepcopy(pair.ours).first.weight, pair.ours.state_dict()["first.weight"]):
                assert weight.is_cuda and torch.equal(weight.cpu(), trained)


def test_the_memory_of_the_plan_is_freed():
    before = torch.cuda.memory_allocated()
    pair = states.Pair(states.adam)
    arena_bytes = pair.trainer.module.memory.arena_taken
    assert torch.cuda.memory_allocated() - before >= arena_bytes > 0
    held = torch.cuda.memory_allocated()
    pair.trainer.close()
    assert held - torch.cuda.memory_allocated() >= arena_bytes
    assert torch.isfinite(pair.ours.first.weight).all()


def test_closing_needs_no_memory_beside_the_plan():
    wide = torch.nn.Linear(3 * 32 * 32, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4)
    model = torch.nn.Sequential(torch.nn.Flatten(), *wide).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images, loss = torch.zeros(8, 3, 32, 32, device="cuda"), torch.nn.CrossEntropyLoss()
    trainer = mbc.from_torch(model, images, loss=loss, optimizer=optimizer, precision="fp32", measure_for="1s")
    trainer.step(images, torch.zeros(8, dtype=torch.int64))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        trainer.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(p.is_cuda and p.isfinite().all() for p in model.parameters())
