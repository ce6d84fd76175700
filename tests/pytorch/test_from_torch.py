"""A loop with mbc compared with the loop in torch, and refusals."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest

import mbc
from mbc.errors import MbcError

torch = pytest.importorskip("torch", reason="the loop is one of PyTorch, which is not installed")
nn = torch.nn
Model = Any


def net() -> Model:
    torch.manual_seed(0)
    # Without a bias before the normalization: its gradient is 0 but for rounding, which Adam makes whole steps of.
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip


def batches(count: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 1, 6, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def sgd(model: Model) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def groups(model: Model) -> Any:
    return torch.optim.AdamW([{"params": model[:3].parameters(), "weight_decay": 0.0},
                              {"params": model[3:].parameters(), "lr": 0.01}], lr=0.002)  # fmt: skip


def trainer_of(model: Model, **other: Any) -> Any:
    given = {"loss": "softmax_cross_entropy", "optimizer": sgd(model), "device": "cpu"} | other
    return mbc.from_torch(model, torch.zeros(8, 1, 6, 6), **given)


@pytest.mark.parametrize(
    ("make", "norm_trains"), [(sgd, True), (groups, False), (lambda m: torch.optim.Adam(m.parameters(), lr=0.01), True)]
)
def test_fifty_steps_beside_torch(make, norm_trains):
    theirs, ours = net(), net()
    for model in (theirs, ours):
        model[1].running_mean += 0.1
        model[1].train(norm_trains)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    one, two = make(theirs), make(ours)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 20, 0.5) for o in (one, two)]
    given = batches(50)
    with trainer_of(ours, loss=loss, optimizer=two) as trainer:
        for images, labels in given:
            one.zero_grad()
            wanted = loss(theirs(images), labels)
            wanted.backward()
            one.step()
            assert float(trainer.step(images, labels)) == pytest.approx(wanted.item(), rel=1e-4)
            for schedule in schedules:
                schedule.step()
        state = ours.state_dict()  # the tensors that the plan trains
        fresh = net()
        fresh.load_state_dict({key: tensor.clone() for key, tensor in state.items()})
        with torch.no_grad():
            expected = fresh.eval()(given[0][0])
        np.testing.assert_allclose(trainer.evaluate(given[0][0]).numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)
    for key, tensor in theirs.state_dict().items():
        np.testing.assert_allclose(state[key].numpy(), tensor.numpy(), rtol=2e-3, atol=2e-4, err_msg=key)
    two.step()  # its own again


def test_clipping_accumulation_and_averages_are_torchs():
    theirs, ours, norms = net(), net(), list[float]()
    optimizer, loss = sgd(theirs), nn.CrossEntropyLoss()
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(theirs, multi_avg_fn=ema, use_buffers=True)
    given = {"loss": loss, "optimizer": sgd(ours), "clip_norm": 0.3, "accumulate": 2, "ema": 0.9}
    with trainer_of(ours, **given) as trainer:
        for images, labels in batches(6):
            pairs = [(images, labels), (images.flip(0) + 1, labels.flip(0))]
            wanted = torch.stack([loss(theirs(x), y) for x, y in pairs]).mean()
            optimizer.zero_grad()
            wanted.backward()
            norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)))
            optimizer.step()
            average.update_parameters(theirs)
            both = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
            assert float(trainer.step(*both)) == pytest.approx(wanted.item(), rel=1e-4)
        averages = trainer.averages()
    assert max(norms) > 0.3  # a step is clipped
    net().load_state_dict(averages)
    for key, tensor in average.module.state_dict().items():
        np.testing.assert_allclose(ours.state_dict()[key], theirs.state_dict()[key], rtol=1e-3, atol=1e-4)
        if tensor.is_floating_point():
            np.testing.assert_allclose(averages[key], tensor, rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.parametrize(
    ("enabled", "of_loss", "of_step"), [(True, ValueError, AssertionError), (False, AttributeError, MbcError)]
)
def test_a_gradient_scaler_around_a_step_is_refused(enabled: bool, of_loss: Any, of_step: Any):
    model, scaler = net(), torch.amp.GradScaler("cpu", enabled=enabled)
    optimizer = sgd(model)
    with trainer_of(model, optimizer=optimizer) as trainer:
        with pytest.raises(of_loss):
            scaler.scale(trainer.step(*batches(1)[0])).backward()
        with pytest.raises(of_step):
            scaler.step(optimizer)


@pytest.mark.parametrize("other", [{"clip_norm": -1}, {"accumulate": 0}, {"accumulate": 2.5}, {"ema": 1.0}])
def test_settings_of_an_update_are_checked(other: dict[str, float]):
    (name,) = other
    with pytest.raises(MbcError, match=f"MBC332: {name} is {other[name]}"):
        trainer_of(net(), **other)


@pytest.mark.parametrize("loss", ["dice", "dice(background=false, batch=true, cross_entropy=1)", "tversky(0.3, 0.7)",
                                  "focal(alpha=0.25)", "dice(sigmoid=true)", "softmax_cross_entropy(0.1)"])  # fmt: skip
def test_losses_by_name_have_settings_as_the_language_writes_them(loss: str):
    torch.manual_seed(0)
    model, regions = nn.Conv3d(1, 4, 3, padding=1), "sigmoid" in loss
    wanted = torch.rand(2, 4, 4, 4, 4).round() if regions else torch.randint(0, 4, (2, 4, 4, 4))
    images, given = torch.ones(2, 1, 4, 4, 4), {"optimizer": sgd(model), "device": "cpu", "check": True}
    with mbc.from_torch(model, images, loss=loss, **given) as trainer:
        losses = [float(trainer.step(images, wanted)) for _ in range(5)]
    assert losses[-1] < losses[0]
    with pytest.raises(MbcError, match="'jaccard' is not one that mbc has"):
        mbc.from_torch(model, images, loss="jaccard", **given)


def test_weights_that_are_loaded_are_trained_and_frozen_ones_stay():
    model, other = net(), net()
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        other[5].bias += 3
    with trainer_of(model) as trainer:
        model.load_state_dict(other.state_dict())
        images, labels = batches(1)[0]
        trainer.step(images, labels, lr=0.0)
        assert torch.equal(model.state_dict()["5.bias"], other[5].bias)
        assert int(model[1].num_batches_tracked) == 1
        trainer.step(images, labels, lr=0.5)
        assert torch.equal(model.state_dict()["0.weight"], other[0].weight)
        assert not torch.equal(model[5].bias, other[5].bias)


class Tied(nn.Module):
    """A model with one layer under two names, which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.again = self.twice

    def forward(self, x: Any) -> Any:
        return self.last(self.again(self.twice(self.first(x.flatten(1)).relu()).relu()))


def tied(_: Model, bias: bool = True) -> Model:
    """Return two layers with one weight, and with separate biases or none."""
    first, second = (nn.Linear(36, 36, bias=bias) for _ in range(2))
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.GELU(), second, nn.GELU(), nn.Linear(36, 3))


@pytest.mark.parametrize("make", [Tied, lambda: tied(net(), bias=False)])
def test_layers_and_parameters_that_are_shared_are_trained_as_one(make):
    torch.manual_seed(0)
    theirs = make()
    ours, one = copy.deepcopy(theirs), sgd(theirs)
    with trainer_of(ours) as trainer:
        for images, labels in batches(3):
            one.zero_grad()
            wanted = nn.functional.cross_entropy(theirs(images), labels)
            wanted.backward()
            one.step()
            assert float(trainer.step(images, labels)) == pytest.approx(wanted.item(), rel=1e-5)
    assert len([*ours.parameters()]) == len([*theirs.parameters()]) < len(ours.state_dict())
    for key, tensor in theirs.state_dict().items():
        np.testing.assert_allclose(ours.state_dict()[key], tensor, rtol=1e-4, atol=1e-6, err_msg=key)


def test_the_model_is_current_and_has_memory_of_its_own_behind_the_trainer():
    model = net()
    images, labels = batches(1)[0]
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_of(model, optimizer=sgd(model))
    trainer.step(images, labels)
    model.eval()
    with torch.no_grad():  # validation inside the loop
        np.testing.assert_allclose(model(images), trainer.evaluate(images), rtol=1e-4, atol=1e-5)
    assert not torch.equal(model[0].weight, before["0.weight"])
    trainer.step(images, labels)
    place, trained = model[0].weight.data_ptr(), model[0].weight.clone()
    gradient = model[0].weight.grad = torch.ones_like(trained)
    twin = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    del trainer
    gc.collect()
    assert model[0].weight.data_ptr() != place and torch.equal(model[0].weight, trained), "nobody holds the trainer"
    assert model[0].weight.grad is gradient
    for other in (model, twin.train(), pickled.train()):
        assert other.train()(images).shape == (8, 3)
        trainer_of(other).close()


def after(change: Any) -> Any:
    return lambda model: (change(model), model)[1]


class Counting(nn.Module):
    """A model whose forward pass changes a buffer."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.inner(x)


class Branching(nn.Module):
    """A module whose control flow depends on the values of its input."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    ("change", "other", "code", "words"),
    [
        (lambda m: m.eval(), {}, "MBC330", "the model is in eval mode"),
        (after(lambda m: m[0].register_forward_hook(print)), {}, "MBC330", "has hooks, which mbc would"),
        (after(lambda m: m[0].register_full_backward_hook(print)), {}, "MBC330", "the module '0' has hooks"),
        (after(lambda m: m[5].bias.register_hook(print)), {}, "MBC330", "the parameter '5.bias' has hooks"),
        (after(lambda m: m[5].bias.register_post_accumulate_grad_hook(print)), {}, "MBC330", "'5.bias' has hooks"),
        (after(lambda m: m.__setitem__(0, m[0].to("meta"))), {}, "MBC330", "is on the meta device"),
        (lambda m: m.to("meta"), {}, "MBC330", "is on the meta device"),
        (lambda m: m.double(), {}, "MBC303", "its parameters are float64"),
        (tied, {}, "MBC303", "are tied to those of '1', which is a different layer or has other settings"),
        (lambda m: m.requires_grad_(False), {}, "MBC332", "the optimizer has no parameter of the model that is"),
        (Branching, {}, "MBC330", "torch.export does not export the model: "),
        (Counting, {}, "MBC303", "it changes 'calls' while it runs"),
        (lambda m: m, {"loss": nn.NLLLoss()}, "MBC331", "this output is not the log_softmax of its classes"),
        (lambda m: m, {"loss": nn.CTCLoss}, "MBC331", "the loss CTCLoss, with these settings, is not one that mbc has"),
        (lambda m: m, {"loss": "hinge"}, "MBC331", "is not one that mbc has"),
        (lambda m: m, {"loss": nn.CrossEntropyLoss(torch.ones(4))}, "MBC331", "weights of 4 classes, but the output"),
        (lambda m: m[:5].append(nn.Linear(4, 1)).append(nn.Flatten(0)), {}, "MBC331", "needs a number for each class"),
        (lambda m: m, {"loss": nn.MSELoss(reduction="none")}, "MBC331", "has reduction="),
    ],
)
def test_immediate_refusals(change, other, code, words):
    with pytest.raises(MbcError) as caught:
        trainer_of(change(net()), **other)
    assert caught.value.code == code and words in caught.value.message


def test_fp64_on_a_gpu_is_refused_for_its_precision(monkeypatch):
    monkeypatch.setattr("mbc.pytorch.make_trainer.current_gpu", object)
    with pytest.raises(MbcError, match="MBC168: precision fp64 runs on the CPU only"):
        trainer_of(net(), precision="fp64", device="cuda")


def test_progress_is_shown_and_its_time_recorded(monkeypatch, capsys):
    monkeypatch.setattr("mbc.progress._PATIENCE_S", 0.0)
    with trainer_of(net(), measure_for="90s") as trainer:
        took = trainer.took
    assert capsys.readouterr().err.startswith("making a trainer ...\n")
    parts = (took.importing_s, took.planning_s, took.measuring_s, took.building_s)
    assert took.importing_s > 0 and took.planning_s > 0 and sum(parts) <= took.all_s
    trainer_of(net(), progress=False).close()
    assert capsys.readouterr().err == ""
    with pytest.raises(MbcError, match=r"MBC167: measure_for is not a duration: '90 days' is not a duration"):
        trainer_of(net(), measure_for="90 days")


def test_hooks_of_all_modules_are_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(MbcError, match=r"MBC330: there are hooks of all modules, which mbc would not call"):
            trainer_of(net())
    finally:
        handle.remove()
    trainer_of(net()).close()


def test_a_function_is_no_model():
    with pytest.raises(MbcError, match=r"MBC330: a function is no torch.nn.Module"):
        mbc.from_torch(nn.functional.relu, torch.zeros(8, 3), loss="mse", optimizer=sgd(net()))


def with_a_hook(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.Adagrad(p), "the optimizer Adagrad is not one that mbc has"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1), "the optimizer SGD has dampening set"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "which it adds to gradients"),
        (
            lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(()))], lr=0.1),
            "the optimizer has a parameter that the model lacks, which mbc would not train",
        ),
        (with_a_hook, "the optimizer has hooks on its step, which mbc would not call"),
    ],
)
def test_optimizers_that_are_refused(make, words):
    model = net()
    with pytest.raises(MbcError) as caught:
        trainer_of(model, optimizer=make(model.parameters()))
    assert caught.value.code == "MBC332" and words in caught.value.message
    with pytest.raises(MbcError, match=r"MBC332: the optimizer has no parameter of the model"):
        trainer_of(model, optimizer=sgd(copy.deepcopy(model)))


def test_refusals_while_it_trains():
    model = net()
    optimizer = groups(model)
    trainer = trainer_of(model, optimizer=optimizer)
    images, labels = batches(1)[0]
    with pytest.raises(MbcError, match=r"MBC333: another trainer trains this model"):
        trainer_of(model, optimizer=groups(model))
    with pytest.raises(MbcError, match=r"MBC333: another trainer trains this model"):  # whose parameters it would take
        trainer_of(nn.Sequential(model))
    with pytest.raises(MbcError, match=r"MBC334: optimizer.step\(\) was called while mbc trains its model"):
        optimizer.step()
    with pytest.raises(MbcError, match=r"MBC336: a batch has 5 samples, but a step of this trainer takes 8"):
        trainer.step(images[:5], labels[:5])
    optimizer.param_groups[1]["lr"] = 1.0
    with pytest.raises(MbcError, match=r"MBC335: the optimizer has the rates \[0.002, 1.0\], but the plan has"):
        trainer.step(images, labels)
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)  # as OneCycleLR does
    with pytest.raises(MbcError, match=r"MBC335: .* betas=\(0.5, 0.999\), but the plan has \(0.9, 0.999\)"):
        trainer.step(images, labels, lr=0.1)


def test_an_exception_within_an_epoch_frees_memory_and_keeps_the_training():
    model, images, labels = net(), *batches(1)[0]
    before = model[0].weight.detach().clone()
    trainer = trainer_of(model)
    module = trainer.module
    with pytest.raises(ZeroDivisionError), trainer:
        first = float(trainer.step(images, labels))
        with pytest.raises(MbcError, match="MBC149"):
            trainer.step(images, labels + 3)
        assert float(trainer.step(images, labels)) < first, "a batch that is refused changes nothing"
        raise ZeroDivisionError
    assert not torch.equal(model[0].weight, before)
    with pytest.raises(MbcError, match="MBC230"):
        module.forward(images)
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises(MbcError, match="the trainer is closed") as caught:
            call(images, labels)
        assert caught.value.code == "MBC230" and "from_torch" in caught.value.remedy
    with trainer_of(model):  # the model is free again
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MbcError, match="there is no GPU to run on") as caught:
        trainer_of(net(), device="cuda")
    assert caught.value.code == "MBC152"
