"""A planned module within PyTorch: copies, closing, refusals, torch.compile, exports, contiguous weights and DDP."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from typing import Any

import pytest

import mbc
from mbc.errors import MbcError
from tests.pytorch.nets import IMAGES, Net, nn, torch
from tests.pytorch.test_planned_module import X, agree, cross_entropy, last_batch, normed, numbers, plain, planned, sgd


def test_states_have_storages_of_their_own_bytes():
    model = planned(normed().double())
    cross_entropy(model).backward()
    for tensor in (*model.state_dict().values(), *(p.grad for p in model.parameters())):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_model_of_its_own(copied):
    model = planned(normed().double())
    twin = copied(model)
    loss = cross_entropy(twin)
    loss.backward()
    with torch.no_grad():
        twin.first.weight.zero_()
    assert model.first.weight.abs().max() > 0 and model.first.weight.grad is None
    assert cross_entropy(model).item() == pytest.approx(loss.item(), rel=1e-9)
    assert type(twin.forward).__name__ == "Forward" and twin.forward.planned is None


def test_closing_leaves_the_model_whole():
    model, twin = normed().double(), normed().double()
    planned(model)
    for one in (model, twin):
        cross_entropy(one).backward()
    model.forward.planned.close()
    assert "forward" not in vars(model)
    agree([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    agree(numbers(plain, model), numbers(plain, twin))
    planned(model)  # a new plan


def test_a_backward_pass_after_the_plan_was_closed_is_refused():
    model = planned(normed().double())
    loss = cross_entropy(model)
    model.forward.planned.close()
    with pytest.raises(RuntimeError, match="was closed after the forward pass"):
        loss.backward()


def test_an_exception_between_the_passes_frees_the_plan():
    model = planned(normed().double())
    with pytest.raises(ValueError, match="of the user"):
        raise_error(model(X))
    cross_entropy(model).backward()


def raise_error(_: Any) -> None:
    raise ValueError("of the user")


def test_a_model_that_mbc_does_not_take_runs_in_torch_with_one_line():
    model = Net(lambda x: torch.fft.fft2(x).real).double()
    with pytest.warns(RuntimeWarning, match="the model runs in PyTorch"):
        assert planned(model, fallback="torch") is model
    assert "forward" not in vars(model)
    with pytest.raises(MbcError):
        planned(model)


def test_no_traceback_precedes_a_refused_example(monkeypatch):
    logged: list[logging.LogRecord] = []
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handle", logged.append)
    model = Net(lambda x: torch.cat((x, x[:, :, 1:]), 1)).double()
    with pytest.raises(MbcError, match=r"MBC330: the model cannot be called with the example: .* size"):
        planned(model)
    assert not logged and not log.disabled


def test_a_warning_names_the_remedy():
    with pytest.warns(RuntimeWarning, match=r"in PyTorch \(MBC330\): the model is in eval mode; call model.train\(\)"):
        planned(normed().double().eval(), fallback="torch")


@pytest.mark.parametrize(
    "name, value",
    [("precision", "fp17"), ("precision", torch.int8), ("precision", 16), ("device", "gpu"), ("memory", torch.inf)]
    + [("memory", given) for given in ("12", "much", 0, -1, None, "0GB", "8 gigs", 12, 12.5, 10**30, "9" * 400)],
)
@pytest.mark.parametrize("make", ["module", "from_torch"])
def test_wrong_settings_are_refused_by_name_though_pytorch_could_run_the_model(name, value, make):
    model = normed()
    whole = {"loss": nn.CrossEntropyLoss(), "optimizer": sgd(model)} if make == "from_torch" else {}
    with pytest.raises(MbcError, match=name) as raised:
        getattr(mbc, make)(model, IMAGES, **{"device": "cpu", "progress": False} | whole | {name: value})
    assert raised.value.code == "MBC167" and "forward" not in vars(model)
    assert value != 12 or 'memory=12 is 12 bytes\nhelp: write a size with its unit: memory="12GB"' in str(raised.value)


@pytest.mark.parametrize("memory", [12e9, "12gb"])
def test_memory_may_be_a_number_of_bytes_or_have_a_unit_in_any_case(memory):
    assert planned(normed().double(), memory=memory).forward.planned.halves.plan.budget_bytes == 12 * 10**9


def test_torch_compile_comes_after_the_plan():
    compiled = torch.compile(normed().double(), backend="eager")
    with pytest.raises(MbcError, match="forward of its own") as raised:
        planned(compiled)
    assert raised.value.code == "MBC330"
    within, twin = (Net(torch.compile(nn.BatchNorm2d(8), backend="eager")).double() for _ in range(2))
    twin.load_state_dict(within.state_dict())
    model = torch.compile(planned(within), backend="eager")  # a call in PyTorch would be refused
    agree(numbers(plain, model), numbers(plain, twin))


def test_a_compiled_function_may_run_both_passes():
    model, twin = planned(normed().double()), normed().double()
    torch.compile(lambda: cross_entropy(model).backward(), backend="eager")()
    cross_entropy(twin).backward()
    agree([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_exports_and_tracers_see_the_models_own_forward():
    model, twin = planned(normed().double()).eval(), normed().double().eval()
    programs = torch.export.export(model, (X,)).module(), torch.jit.trace(model, X)
    agree([program(X / 2).detach() for program in programs], [twin(X / 2).detach()] * 2)
    assert [*inspect.signature(model.forward).parameters] == ["x"]


def by_views(model: Any) -> Any:
    """LBFGS, and one vector of all weights: both take views of weights and gradients. Then inputs of other shapes."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = cross_entropy(model)
        loss.backward()
        return loss

    yield optimizer.step(closure)
    yield nn.utils.parameters_to_vector(model.parameters())
    yield from last_batch(model)
    yield cross_entropy(model, X[:, :, 1:])


def test_weights_and_gradients_may_be_contiguous():
    body = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(4, 8), nn.ReLU())
    model, twin = (Net(copy.deepcopy(body)).double() for _ in range(2))
    agree(numbers(by_views, planned(model, contiguous=True)), numbers(by_views, twin))
    assert all(p.is_contiguous() and p.grad.is_contiguous() for p in model.parameters())


def test_a_second_plan_and_other_types_are_refused():
    model = planned(normed().double())
    with pytest.raises(MbcError, match="has a plan already"):
        planned(model)
    with pytest.raises(MbcError, match="float32"):
        planned(normed())


def test_ddp_comes_after_the_plan(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        model, twin = normed().double(), normed().double()
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(model))
        with pytest.raises(MbcError, match="MBC333: this model is within DistributedDataParallel"):
            planned(model)
        del wrapped
        ours, theirs = nn.parallel.DistributedDataParallel(planned(model)), nn.parallel.DistributedDataParallel(twin)
        for one, wanted in zip(plain(ours), plain(theirs), strict=True):
            assert one.item() == pytest.approx(wanted.item(), rel=1e-6)
    finally:
        torch.distributed.destroy_process_group()
