"""The optimizer's state while mbc trains: saved, loaded and changed as in PyTorch, wherever the plan keeps it."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from tests.pytorch.nets import IMAGES, LABELS, Net, nn, sgd, torch, trainer_of

GIVEN: dict[str, Any] = {}  # arguments of the trainers
EXACT, START = 1e-9, "cpu"  # relative error of losses, device on which models begin


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def decayed(model: Any) -> Any:
    rest = [p for p in model.parameters() if p is not model.first.weight]
    groups = [{"params": [model.first.weight]}, {"params": rest, "lr": 0.002}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95))


class Pair:
    """A model that mbc trains, and one that PyTorch trains in float64."""

    def __init__(self, make: Any, **other: Any) -> None:
        self.ours = (other.pop("model", None) or Net()).to(START)
        self.theirs = copy.deepcopy(self.ours).to("cpu", torch.float64)
        self.one, self.two = make(self.ours), make(self.theirs)
        self.trainer = trainer_of(self.ours, optimizer=self.one, **(other | GIVEN))

    def both(self) -> Iterator[tuple[Any, Any]]:
        yield from ((self.ours, self.one), (self.theirs, self.two))

    def torch_step(self, model: Any, optimizer: Any) -> Any:
        optimizer.zero_grad()
        weight = next(model.parameters())
        loss = nn.functional.cross_entropy(model(IMAGES.to(weight)), LABELS.to(weight.device))
        loss.backward()
        optimizer.step()
        return loss

    def step(self, rel: float = 0.0) -> None:
        wanted = self.torch_step(self.theirs, self.two).item()
        assert float(self.trainer.step(IMAGES, LABELS)) == pytest.approx(wanted, rel=max(rel, EXACT))

    def compare(self, rtol: float = 1e-7) -> None:
        states, wanted = self.one.state_dict()["state"], self.two.state_dict()["state"]
        assert states.keys() == wanted.keys()
        rtol = max(rtol, EXACT)
        for number, entries in wanted.items():
            for key in entries:
                given = states[number][key].to(entries[key])
                torch.testing.assert_close(given, entries[key], rtol=rtol, atol=rtol / 100, msg=key)


def saved(model: Any, optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    assert len(file.getvalue()) < 20_000, "each tensor is saved alone"
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("make", [sgd, adam, decayed, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)])
def test_a_training_goes_back_to_its_checkpoint_and_on_in_torch(make):
    pair = Pair(make)
    pair.step()
    kept = [saved(*each) for each in pair.both()]
    for _ in range(2):
        pair.step()
        pair.compare()
    held = pair.one.state_dict()["state"]
    before = copy.deepcopy(held)
    for (weights, state), (model, optimizer) in zip(kept, pair.both(), strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    pair.step()
    pair.compare()
    for number, entries in before.items():
        assert all(torch.equal(held[number][key], entries[key]) for key in entries if key != "step")
    pair.trainer.close()
    pair.compare(1e-5)
    pair.torch_step(pair.ours, pair.one)
    pair.torch_step(pair.theirs, pair.two)
    pair.compare(1e-4)
    assert {tensor.device.type for tensor in pair.ours.state_dict().values()} == {START}
    pair.trainer = trainer_of(pair.ours, optimizer=pair.one, **GIVEN)
    pair.step(1e-5)
    pair.compare(1e-4)


def moments(optimizer: Any) -> list[tuple[Any, str, Any]]:
    """Return the optimizer's entry of a parameter, a key there, and its tensor, for each moment."""
    entries = optimizer.state.values()
    return [(entry, key, tensor) for entry in entries for key, tensor in entry.items() if key != "step"]


CHANGES = (
    lambda optimizer: [tensor.mul_(0.5) for _, _, tensor in moments(optimizer)],
    lambda optimizer: [entry.update({key: tensor * 0.5}) for entry, key, tensor in moments(optimizer)],
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: [entry["step"].add_(100) for entry in optimizer.state.values()],
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_counts_from_the_next_step_on(change):
    pair = Pair(adam)
    with pair.trainer:
        pair.step()
        pair.step()
        for _, optimizer in pair.both():
            optimizer.state_dict()
            change(optimizer)
        pair.step()
        pair.step()
        pair.compare()


def test_a_step_that_is_skipped_does_not_count():
    pair = Pair(adam)
    with pair.trainer as trainer:
        pair.step()
        assert not trainer.step(torch.inf * IMAGES, LABELS).item() < torch.inf
        pair.step()
        pair.compare()


def test_states_in_host_memory_are_shared_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(297, 200), nn.ReLU(), nn.Linear(200, 5))
    with Pair(adam, model=copy.deepcopy(model), precision="fp32").trainer as trainer:
        predicted = trainer.module.plan.predictions
    memory = f"{predicted.arena_bytes + predicted.overhead_bytes - 20_000}B"
    pair = Pair(adam, model=model, precision="fp32", memory=memory)
    assert Space.HOST in {place.space for place in pair.trainer.module.places.values()}
    with pair.trainer:
        for _ in range(2):
            pair.step(1e-5)
        state = copy.deepcopy(pair.one.state_dict())
        pair.compare(1e-3)
        pair.step(1e-4)
        pair.one.load_state_dict(state)
        pair.trainer.step(IMAGES, LABELS, lr=0.0)
        assert {int(entries["step"]) for entries in pair.one.state_dict()["state"].values()} == {3}


REFUSED = {
    "parameters after 1 and 2 steps": lambda entry: entry["step"].add_(1),
    r"'exp_avg' of shape \[2, 2\]": lambda entry: entry.update(exp_avg=torch.zeros(2, 2)),
}


@pytest.mark.parametrize(("words", "change"), REFUSED.items())
def test_states_that_the_plan_cannot_take_are_refused(words, change):
    pair = Pair(adam)
    with pair.trainer as trainer:
        pair.step()
        change(pair.one.state_dict()["state"][0])
        with pytest.raises(MbcError, match=f"MBC335: the optimizer has {words}"):
            trainer.step(IMAGES, LABELS)
    with pytest.raises(MbcError, match="MBC335"):
        trainer_of(pair.ours, optimizer=pair.one)
    pair.one.state.clear()
    trainer_of(pair.ours, optimizer=pair.one).close()
