"""Models with attributes, outputs, inputs and parameters of all kinds: trained like in torch, or refused."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from tests.pytorch.nets import IMAGES, LABELS, Net, nn, torch, train_beside, trainer_of

functional = nn.functional


def holding(value: Any) -> Any:
    model = Net()
    model.held = value
    return model


def numbers() -> Any:
    yield 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: holding(threading.Lock()),
        lambda: holding([threading.Lock(), torch.ones(1)]),
        lambda: holding(Path(__file__).open()),  # noqa: SIM115
        lambda: holding(numbers()),
        lambda: holding(torch.Generator()),
        lambda: holding(IMAGES.clone().requires_grad_() * 2),
    ],
    ids=["lock", "list with a lock", "file", "generator", "torch's generator", "activation"],
)
def test_attributes_that_cannot_be_copied_do_not_matter(make):
    model = make()
    with trainer_of(model) as trainer:
        wanted = functional.cross_entropy(Net().double()(IMAGES.double()), LABELS)
        assert float(trainer.step(IMAGES, LABELS)) == pytest.approx(wanted.item(), rel=1e-9)


Pair = namedtuple("Pair", ("logits", "auxiliary"))


@dataclass
class Result:
    logits: Any
    auxiliary: Any


class Heads(nn.Module):
    """A network with two outputs of one shape, in a `container`."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.fc, self.auxiliary = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.Linear(4, 5)
        self.container = container

    def forward(self, x: Any) -> Any:
        y = self.stem(x).relu().mean((2, 3))
        return self.container(self.fc(y), self.auxiliary(y))


def in_a_dict(logits: Any, auxiliary: Any) -> Any:
    return {"logits": logits, "auxiliary": [auxiliary, None]}


@pytest.mark.parametrize("container", [Pair, Result, in_a_dict, lambda *both: both])
def test_two_outputs_have_two_targets_and_weights(container):
    cross, others = nn.CrossEntropyLoss(), LABELS.flip(0)

    def judge(outputs: Any) -> Any:
        both = list(vars(outputs).values()) if isinstance(outputs, Result) else outputs
        first, second = (both["logits"], both["auxiliary"][0]) if isinstance(both, dict) else both
        return cross(first, LABELS) + 0.4 * cross(second, others)

    trainer = train_beside(Heads(container), judge, given=(LABELS, others), loss=[cross, (cross, 0.4)])
    assert trainer.source.count("\n  input target") == 2


class Ending(Net):
    """A network whose last operation is a function."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Any) -> Any:
        return self.end(super().forward(x))


SHARES = torch.softmax(torch.randn(len(LABELS), 5, generator=torch.Generator().manual_seed(4)), 1).double()
IGNORED = torch.where(torch.arange(len(LABELS)) % 3 == 1, -100, LABELS)


def log_softmax(x: Any) -> Any:
    return functional.log_softmax(x, dim=1)


@pytest.mark.parametrize(
    ("loss", "end", "target"),
    [
        (nn.CrossEntropyLoss(), torch.tanh, IGNORED),
        (functional.cross_entropy, torch.tanh, IGNORED),
        (nn.CrossEntropyLoss(ignore_index=2, weight=torch.arange(1.0, 6.0), label_smoothing=0.2), torch.tanh, LABELS),
        (nn.CrossEntropyLoss(label_smoothing=1.0), torch.tanh, LABELS),
        (nn.CrossEntropyLoss(reduction="sum"), torch.tanh, LABELS),
        (nn.NLLLoss(), log_softmax, IGNORED),
        (nn.NLLLoss(weight=torch.arange(1.0, 6.0)), log_softmax, LABELS),
        (nn.KLDivLoss(reduction="batchmean"), log_softmax, SHARES),
        (nn.KLDivLoss(), log_softmax, SHARES),
        (nn.BCELoss(), torch.sigmoid, SHARES),
        (nn.BCELoss(reduction="sum"), torch.sigmoid, SHARES),
        (nn.HuberLoss(delta=0.3), torch.tanh, SHARES),
        (nn.MSELoss(reduction="sum"), torch.tanh, SHARES),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.tanh, SHARES),
        (nn.BCEWithLogitsLoss(), torch.tanh, SHARES),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0])), torch.tanh, SHARES),
        (nn.L1Loss(), torch.tanh, SHARES),
        (nn.SmoothL1Loss(beta=0.5), torch.tanh, SHARES),
    ],
)
def test_losses_are_those_of_torch(loss, end, target):
    exact = loss if not isinstance(loss, nn.Module) or getattr(loss, "weight", None) is None else copy.deepcopy(loss)
    if exact is not loss:
        exact.weight = exact.weight.double()
    train_beside(Ending(end), lambda output: exact(output, target), loss=loss, given=(target,), targets=target)


ENDS = {
    "clamps": lambda y: y.clamp(-0.2, 0.3) + functional.hardtanh(y, 0.0, 0.1) * y.clamp(min=0.0),
    "relu twice": lambda y: y.relu().clamp(min=0.0) * functional.hardtanh(y.relu(), 0.0, 1.0),
    "ties": lambda y: torch.maximum(y.relu(), y.clamp(min=0.0)) - torch.minimum(y.relu(), torch.tensor(0.0)),
    "largest of ties": lambda y: y.relu().max(1, keepdim=True)[0] * y + y.relu().min(1, keepdim=True)[0],
    "masks": lambda y: torch.where(y > 0, y * y, 0.1 * y).masked_fill(y > 0.5, 0.7) * (y <= 0.4).float(),
    "detached": lambda y: y * torch.sigmoid(y).detach() + y.tanh(),
    "glu": lambda y: functional.glu(torch.cat((y, y.tanh()), 1), 1),
    "normalize": lambda y: functional.normalize(y.relu() - y.relu()) + functional.normalize(y),
    "deviations": lambda y: (
        (y.std(1, keepdim=True) + (y.relu() - y.relu()).std(1, keepdim=True)) * y + y.norm(1, 1, True)
    ),
    "shrinkage": lambda y: (
        functional.softshrink(y, 0.1) + functional.hardshrink(y, 0.1) + functional.threshold(y, 0, -1)
    ),
    "slopes": lambda y: functional.leaky_relu(y, -0.2) + functional.selu(y) + functional.elu(y, -0.4) + y**0,
    "curves": lambda y: functional.celu(y, 0.5) + functional.softplus(y, 2.0, 0.5) + functional.logsigmoid(y),
}


@pytest.mark.parametrize("end", ENDS)
def test_gradients_at_kinks_and_ties_are_those_of_torch(end):
    loss = nn.MSELoss()
    train_beside(Ending(ENDS[end]), lambda output: loss(output, SHARES), loss=loss, given=(SHARES,))


class PartlyWithoutGradients(Net):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        with torch.no_grad():
            gate = torch.sigmoid(super().forward(x + 0.1))
        return y * gate


def test_a_region_without_gradients_is_detached():
    train_beside(PartlyWithoutGradients())


def test_a_head_of_one_number_a_row():
    for loss, end in ((nn.MSELoss(), lambda y: y[:, 0]), (nn.BCEWithLogitsLoss(), lambda y: y.mean(1, True).view(-1))):
        targets = SHARES[:, 1]
        train_beside(
            Ending(end), lambda output, loss=loss, targets=targets: loss(output, targets), loss=loss, given=(targets,)
        )


def test_an_output_without_a_loss():
    train_beside(
        Heads(lambda *both: both), lambda both: functional.cross_entropy(both[1], LABELS),
        loss=[None, nn.CrossEntropyLoss()],
    )  # fmt: skip


class Opaque:
    def __init__(self, *tensors: Any) -> None:
        self.tensors = tensors


@pytest.mark.parametrize(
    ("container", "loss", "code", "words"),
    [
        (Pair, "softmax_cross_entropy", "MBC331", "the model has 2 outputs and one loss: each output has a target"),
        (Pair, ["mse"] * 3, "MBC331", "the model has 2 outputs and 3 losses"),
        (Pair, [None, None], "MBC331", "no output has a loss"),
        (Opaque, "mse", "MBC330", "the model returns a Opaque, whose tensors mbc cannot find"),
    ],
)
def test_outputs_that_are_refused(container, loss, code, words):
    with pytest.raises(MbcError) as caught:
        trainer_of(Heads(container), loss=loss)
    assert caught.value.code == code and words in caught.value.message


class TwoInputs(Net):
    def forward(self, mask: Any, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


def test_an_input_that_the_model_does_not_use_is_left_out():
    train_beside(TwoInputs(), inputs=(torch.zeros(4, 2), IMAGES))


@pytest.mark.parametrize("images", [IMAGES.to(torch.bfloat16), IMAGES.half(), IMAGES.numpy()])
def test_images_of_half_precision_and_arrays_are_taken(images):
    wanted = functional.cross_entropy(Net().double()(torch.as_tensor(images).double()), LABELS)
    labels = LABELS.numpy() if isinstance(images, np.ndarray) else LABELS
    with trainer_of(Net(), example=images) as trainer:
        assert float(trainer.step(images, labels)) == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (IMAGES.to("meta"), "input 1 of the example is a tensor on meta"),
        (IMAGES.to_sparse(), "input 1 of the example is a tensor on cpu of torch.sparse_coo, but"),
        ({"pixels": IMAGES}, "input 1 of the example is a dict, but mbc takes only dense tensors"),
        ((IMAGES, "cat"), "input 2 of the example is a str, but mbc takes only dense tensors"),
        ((), "the example has no tensor"),
        (IMAGES[:0], "the example has no rows"),
    ],
)
def test_examples_that_are_refused(example, words):
    with pytest.raises(MbcError) as caught:
        trainer_of(Net(), example=example)
    assert caught.value.code == "MBC337" and words in caught.value.message


@pytest.mark.parametrize(
    ("precision", "name"),
    [(torch.float64, "fp64"), (torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")],
)
def test_memory_in_bytes_and_precision_as_a_type(precision, name):
    with trainer_of(Net(), memory=12_000_000_000, precision=precision) as trainer:
        assert trainer.module.plan.graph.precision == name


def test_autocast_is_not_a_part_of_the_model():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(MbcError, match="MBC330: autocast is on") as caught:
        trainer_of(Net())
    assert "outside of autocast" in (caught.value.remedy)


def sharing() -> Any:
    model = nn.Sequential(nn.Flatten(), nn.Linear(297, 297), nn.ReLU(), nn.Linear(297, 297))
    model[3].weight.data = model[1].weight.data
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (sharing, "'1.weight' and '3.weight' are two tensors that share memory, which mbc would train separately"),
        (lambda: Net(nn.BatchNorm2d(8, momentum=None)), "the batch norm 'body' averages its statistics over all"),
        (lambda: Net(nn.LazyBatchNorm2d()), "'body.weight' has no shape yet"),
    ],
)
def test_models_that_are_refused(make, words):
    with pytest.raises(MbcError) as caught:
        trainer_of(make())
    assert caught.value.code == "MBC330" and words in caught.value.message


def test_parameters_that_are_parts_of_one_vector_are_trained():
    model = Net()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    train_beside(model)


class Doubled(nn.Module):
    def forward(self, weight: Any) -> Any:
        return 2 * weight


def test_an_own_parametrisation_is_trained_or_refused():
    model = Net()
    nn.utils.parametrize.register_parametrization(model.head[2], "weight", Doubled())
    try:
        train_beside(model)
    except MbcError as error:
        assert error.code == "MBC303" and "'head.2" in error.message


def test_rows_of_an_example_are_those_of_a_step():
    with trainer_of(Net()) as trainer, pytest.raises(MbcError, match="MBC336"):
        trainer.step(np.zeros((3, 3, 9, 11), np.float32), LABELS[:3])


@pytest.mark.parametrize(
    ("loss", "label", "example"),
    [
        (nn.CrossEntropyLoss(), -100, torch.tensor([0, -100, 4, 1])),
        (functional.cross_entropy, -100, torch.tensor([-100, -100, 4, 1])),
        (nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1), -1, None),
        (nn.CrossEntropyLoss(torch.arange(1.0, 6.0), ignore_index=3), 3, None),
    ],
)
def test_labels_that_are_left_out(loss, label, example):
    labels = torch.tensor([0, label, 4, label])
    judge = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    train_beside(Net(), lambda output: judge(output, labels), loss=loss, given=(labels,), targets=example, check=True)


@pytest.mark.parametrize(
    ("target", "words", "remedy"),
    [
        (torch.tensor([0, -100, 4, 1]), "labels of -100, which the loss ignores", "targets=labels"),
        (torch.full((4, 5), 0.2), "a target holds floats in the shape [4, 5]", "targets=probabilities"),
    ],
)
def test_targets_that_do_not_fit_the_trainer(target, words, remedy):
    with trainer_of(Net()) as trainer:
        with pytest.raises(MbcError, match="MBC331") as caught:
            trainer.step(IMAGES, target)
        assert words in caught.value.message and remedy in caught.value.remedy
        trainer.step(IMAGES, LABELS)


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_part(model: Any) -> Any:
    model.first = torch.compile(model.first, backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled", [lambda model: torch.compile(model, backend="eager"), compiled_in_place, compiled_part]
)
def test_a_compiled_model_is_trained_like_the_original(compiled):
    train_beside(compiled(Net(nn.BatchNorm2d(8))))


def test_a_function_that_knows_the_model_leaves_no_trace_in_it():
    model = Net(nn.BatchNorm2d(8))
    forward = model.forward
    model.forward = lambda x: forward(x)
    with pytest.raises(MbcError):
        trainer_of(model)
    assert int(model.body.num_batches_tracked) == 0 and not model.body.running_mean.any()
