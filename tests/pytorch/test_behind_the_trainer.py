"""Torch reads and changes a model while mbc trains it: values are current, and changes count or are refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

from mbc.errors import MbcError
from tests.pytorch.nets import IMAGES, LABELS, Net, nn, sgd, torch, trainer_of


def normed() -> Any:
    return Net(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: Any) -> Any:
    average = torch.optim.swa_utils.AveragedModel(Net(), use_buffers=True)
    average.update_parameters(model)
    return average.module


@pytest.mark.parametrize("read", [copy.deepcopy, saved, averaged])
def test_readers_of_the_model_see_trained_weights(read):
    model = Net()
    with trainer_of(model) as trainer:
        trainer.step(IMAGES, LABELS)
        twin = read(model)
        assert torch.equal(model.first.weight, torch.from_numpy(trainer.module.state("first.weight")))
        assert torch.allclose(twin.first.weight.double(), model.first.weight)
        again = twin.first.weight.detach().clone()
        trainer.step(IMAGES, LABELS)
        assert torch.equal(twin.first.weight, again), "the copy is nobody's"


def scale(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.mul_(0.5)


def scale_data(model: Any) -> None:
    model.first.weight.data.mul_(0.5)


def replace_data(model: Any) -> None:
    model.first.weight.data = model.first.weight.data * 0.5


def load_a_part(model: Any) -> None:
    half = {name: tensor.clone() * 0.5 for name, tensor in model.first.state_dict().items()}
    model.first.load_state_dict(half)


@pytest.mark.parametrize("change", [scale, scale_data, replace_data, load_a_part])
def test_changes_of_a_model_count_from_the_next_step_on(change):
    theirs, ours = Net().double(), Net()
    optimizer = sgd(theirs)
    with trainer_of(ours) as trainer:
        for number in range(4):
            optimizer.zero_grad()
            wanted = nn.functional.cross_entropy(theirs(IMAGES.double()), LABELS)
            wanted.backward()
            optimizer.step()
            assert float(trainer.step(IMAGES, LABELS)) == pytest.approx(wanted.item(), rel=1e-6)
            if number == 1:
                change(ours)
                change(theirs)


def test_statistics_of_a_call_in_training_mode_count():
    model = Net(nn.BatchNorm2d(8))
    twin = copy.deepcopy(model).double()
    with trainer_of(model) as trainer:
        trainer.step(IMAGES, LABELS)
        model(2 * IMAGES.double())
        trainer.step(IMAGES, LABELS, lr=0.0)
    optimizer = sgd(twin)
    nn.functional.cross_entropy(twin(IMAGES.double()), LABELS).backward()
    optimizer.step()
    twin(2 * IMAGES.double())
    twin(IMAGES.double())
    assert torch.allclose(model.body.running_var.double(), twin.body.running_var, rtol=1e-5)
    assert int(model.body.num_batches_tracked) == int(twin.body.num_batches_tracked) == 3


def hold(model: Any) -> None:
    """Replace a weight whose earlier memory somebody holds."""
    model.earlier = model.first.weight.data
    replace_data(model)


def join(model: Any) -> None:
    """Replace a weight by a part of a tensor that somebody holds."""
    model.vector = torch.zeros(2, *model.first.weight.shape, dtype=torch.float64)
    model.first.weight.data = model.vector[0]


@pytest.mark.parametrize(("change", "words"), [(hold, "its earlier memory is in use"), (join, "in use elsewhere")])
def test_a_replaced_weight_is_refused_while_somebody_holds_its_memory(change, words):
    model = Net()
    with trainer_of(model) as trainer:
        trainer.step(IMAGES, LABELS)
        change(model)
        with pytest.raises(MbcError, match=f"MBC338: .* 'first.weight' was replaced.*{words}") as caught:
            trainer.step(IMAGES, LABELS)
        assert "p.copy_" in caught.value.remedy


CHANGES = {
    "'first.weight.requires_grad' is False now": lambda m: m.first.requires_grad_(False),
    "'body.0.training' was True and is False now": lambda m: m.body[0].eval(),
    "'body.0.momentum' was 0.1 and is 0.5 now": lambda m: setattr(m.body[0], "momentum", 0.5),
    "the layers of 'body' have changed": lambda m: setattr(m.body, "1", nn.GELU()),
    "'first.weight' was replaced": lambda m: setattr(m.first, "weight", nn.Parameter(m.first.weight.detach().clone())),
    "the module 'first' has hooks": lambda m: m.first.register_forward_hook(lambda *_: None),
    "the parameter 'first.weight' has hooks": lambda m: m.first.weight.register_hook(lambda gradient: gradient),
}


@pytest.mark.parametrize(("words", "change"), CHANGES.items())
def test_settings_that_change_are_refused(words, change):
    model = normed()
    with trainer_of(model) as trainer:
        trainer.step(IMAGES, LABELS)
        change(model)
        with pytest.raises(MbcError) as caught:
            trainer.step(IMAGES, LABELS)
        assert caught.value.code == "MBC338" and words in caught.value.message


def test_a_loss_and_an_optimizer_that_change_are_refused():
    model, loss = Net(), nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = sgd(model)
    with trainer_of(model, loss=loss, optimizer=optimizer) as trainer:
        loss.label_smoothing = 0.2
        with pytest.raises(MbcError, match=r"MBC338: .* 'loss.0.label_smoothing' was 0.1 and is 0.2 now"):
            trainer.step(IMAGES, LABELS)
        loss.label_smoothing = 0.1
        handle = optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(MbcError, match=r"MBC338: .* the hooks of the optimizer have changed"):
            trainer.step(IMAGES, LABELS)
        handle.remove()
        trainer.step(IMAGES, LABELS)


def test_validation_in_eval_mode_and_moves_change_nothing():
    model = normed()
    with trainer_of(model) as trainer:
        trainer.step(IMAGES, LABELS)
        model.eval()
        model(IMAGES.double())
        trainer.step(IMAGES, LABELS)
        model.train().to("cpu")
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        trainer.step(IMAGES, LABELS)
        assert trainer.module.control["updates"] == 3


def test_autocast_in_another_precision_is_refused():
    words = r"MBC338: the trainer cannot follow a change: autocast asks for bf16, but the plan computes in fp32"
    single = trainer_of(Net(), precision="fp32")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(MbcError, match=words):
        single.step(IMAGES, LABELS)
    with trainer_of(Net(), precision="bf16") as trainer, torch.autocast("cpu", torch.bfloat16):
        trainer.step(IMAGES, LABELS)
