"""Writes in place, through views and to their bases: the functional program computes PyTorch's results."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from mbc.interchange.aten.operation_schemas import schema_of
from mbc.interchange.functionalize import functionalize
from mbc.interchange.grad_regions import inline_regions
from mbc.interchange.program import Argument, Opaque, Program, TensorName
from mbc.interchange.pt2 import read_pt2
from mbc.resources import data_text
from tests.interchange.models import Model, Tensor, exported, nn, torch

F = torch.nn.functional
Function = Callable[[Tensor], Tensor]
PLACES = ("memory_format", "device", "layout", "pin_memory")


class Functions(nn.Module):
    """A model that applies functions one after another to a copy of its input, which is a parameter's image."""

    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 6, 1, 1))
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        return reduce(lambda y, function: function(y), self.functions, x * self.scale)


def carried_out(program: Program, *inputs: Tensor) -> list[Tensor]:
    """Run the nodes of a program by PyTorch's own operations."""
    tensors: dict[str, Any] = dict(zip(program.inputs, inputs, strict=True))
    for name, held in program.held.items():
        tensors[name] = torch.from_numpy(program.arrays[held.storage].copy())

    def value(argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return [value(item) for item in argument]
        if isinstance(argument, Opaque):  # a type; other fields are the places of bytes
            return getattr(torch, argument.what.removeprefix("as_scalar_type "), None)
        return tensors[argument.name] if isinstance(argument, TensorName) else argument

    for node in program.nodes:
        assert node.refusal is None, node
        namespace, name, overload = node.target.split(".")
        operation = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        results = operation(**{key: value(argument) for key, argument in node.arguments.items() if key not in PLACES})
        results = results if isinstance(results, list | tuple) else [results]
        tensors.update(zip(node.outputs, results, strict=True))
    return [tensors[name] for name in program.outputs]


def without_writes(path: Path, model: Model, *inputs: Tensor) -> Program:
    program = functionalize(inline_regions(read_pt2(exported(path, model, *inputs))))
    for node in program.nodes:
        schema = schema_of(node.target)
        assert schema is None or not schema.written, node.target
    return program


def check(path: Path, *functions: Function) -> Program:
    model, x = Functions(*functions), torch.randn(2, 6, 4, 4)
    program = without_writes(path, model, x)
    torch.testing.assert_close(carried_out(program, x)[0], model(x).detach(), rtol=1e-5, atol=1e-6)
    return program


VIEWS: dict[str, Function] = {
    "slice": lambda y: y[:, 1:4],
    "steps": lambda y: y[:, ::2],
    "select": lambda y: y[:, 2],
    "negative": lambda y: y[:, -2, 1:],
    "narrow": lambda y: y.narrow(2, 1, 2),
    "flatten": lambda y: y.flatten(2),
    "view": lambda y: y.view(2, 3, 2, 16),
    "unsqueeze": lambda y: y.unsqueeze(1),
    "transpose": lambda y: y.transpose(1, 3),
    "permute": lambda y: y.permute(0, 3, 1, 2),
    "movedim": lambda y: y.movedim(1, 3),
    "unflatten": lambda y: y.unflatten(1, (2, 3)),
    "contiguous": lambda y: y.contiguous(),
    "copied": lambda y: y.transpose(1, 2).contiguous(),
    "reshaped": lambda y: y.transpose(1, 2).reshape(2, -1),
    "dropped": lambda y: F.dropout(y, 0.5, training=False),
    "clone": lambda y: y.clone(),
    "same type": lambda y: y.to(torch.float32),
    "type of": lambda y: y.type_as(y),
    "shuffle": lambda y: F.channel_shuffle(y, 1),
    "pixels": lambda y: F.pixel_shuffle(y, 1),
    "roll": lambda y: y.roll(0, 2),
    "pad": lambda y: F.pad(y, (0, 0)),
    "interpolate": lambda y: F.interpolate(y, scale_factor=1),
    "repeat": lambda y: y.repeat(1, 1, 1, 1),
}
WRITES: dict[str, Function] = {
    "mul_": lambda y: y.mul_(3.0),
    "add_": lambda y: y.add_(1.0, alpha=2.0),
    "tanh_": lambda y: y.tanh_(),
    "relu_": lambda y: F.relu(y, inplace=True),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(0.25),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "clamp_": lambda y: y.clamp_(-0.5, 0.5),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_through_a_view(view: str, write: str, tmp_path: Path) -> None:
    def function(y: Tensor) -> Tensor:
        WRITES[write](VIEWS[view](y))
        return y

    check(tmp_path, function)


def test_a_view_sees_writes_to_its_base(tmp_path: Path) -> None:
    for view in VIEWS.values():

        def function(y: Tensor, view: Function = view) -> Tensor:
            part = view(y)
            y.mul_(0.5)
            return part

        check(tmp_path, function)


def test_parts_that_share_no_elements(tmp_path: Path) -> None:
    for function in (
        lambda y: y[:, :3].add_(y[:, 3:]),
        lambda y: y[:, ::2].mul_(y[:, 1::2]),
        lambda y: y[:, 0].sub_(y[:, -1]),
        lambda y: y.mul_(y),
        lambda y: y.transpose(1, 2).add_(y.transpose(1, 2)),
    ):

        def whole(y: Tensor, function: Function = function) -> Tensor:
            function(y)
            return y

        check(tmp_path, whole)


def test_drawn_programs(tmp_path: Path) -> None:
    """Tensors that may share memory are viewed, written and read in random order."""
    for seed in range(40):
        draw = random.Random(seed)
        plan = [(draw.random(), draw.choice([*VIEWS]), draw.choice([*WRITES])) for _ in range(8)]
        picks = [draw.random() for _ in plan]

        def function(y: Tensor, plan: Any = plan, picks: Any = picks) -> Tensor:
            tensors = [y]
            for (kind, view, write), pick in zip(plan, picks, strict=True):
                chosen = tensors[int(pick * len(tensors))]
                if kind < 0.5 and chosen.shape == y.shape:
                    tensors.append(VIEWS[view](chosen))
                elif kind < 0.8:
                    WRITES[write](chosen)
                else:
                    tensors.append(chosen * 2.0)
            return torch.stack([tensor.sum() for tensor in tensors])

        check(tmp_path, function)


def test_views_in_place(tmp_path: Path) -> None:
    check(tmp_path, lambda y: y.unsqueeze_(1).mul_(2.0), lambda y: y.squeeze_(1).transpose_(1, 2))


def test_unneeded_operations_are_left_out(tmp_path: Path) -> None:
    def function(y: Tensor) -> Tensor:
        y[:, 1:].tanh()
        part = y * 2.0
        part[:, 0] = 0.0
        return y

    program = check(tmp_path, function)
    assert [node.target for node in program.nodes] == ["aten.mul.Tensor"]


def test_regions_without_gradients_are_detached(tmp_path: Path) -> None:
    def function(y: Tensor) -> Tensor:
        with torch.no_grad():
            mean = y.mean(1, keepdim=True)
            mean.mul_(2.0)
        with torch.autocast("cpu", enabled=False):
            return y - mean

    program = check(tmp_path, function)
    assert [node.target for node in program.nodes].count("aten.detach.default") == 1


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda y: y.detach().mul_(2.0) + y, "it changes a detached tensor"),
        (lambda y: y.add_(y[:, :1]), "it reads and writes overlapping parts"),
        (lambda y: y[:, :2].mul_(y[:, 1:3]), "it reads and writes overlapping parts"),
        (lambda y: (torch._foreach_mul_([y], 2.0), y)[1], "it writes to several tensors, or to an unknown one"),
        (lambda y: y.diagonal(0, 2, 3).zero_().sum() + y, "it writes to the result of diagonal"),
    ],
)
def test_writes_that_are_refused(function: Function, reason: str, tmp_path: Path) -> None:
    program = functionalize(inline_regions(read_pt2(exported(tmp_path, Functions(function), torch.randn(2, 6, 4, 4)))))
    assert any(node.refusal is not None and reason in node.refusal[0] for node in program.nodes)


def test_gradients_that_are_turned_on_again(tmp_path: Path) -> None:
    def function(y: Tensor) -> Tensor:
        with torch.no_grad():
            z = y * 2.0
            with torch.enable_grad():
                z = z * y
            z = z + 1.0
        return z + y

    program = check(tmp_path, function)  # torch.export makes two regions of it
    assert [node.target for node in program.nodes].count("aten.detach.default") == 2


def test_a_write_behind_the_back_of_gradients_is_refused(tmp_path: Path) -> None:
    def function(y: Tensor) -> Tensor:
        z = y * 2.0
        with torch.no_grad():
            z.mul_(2.0)
        return z

    program = functionalize(inline_regions(read_pt2(exported(tmp_path, Functions(function), torch.randn(2, 6, 4, 4)))))
    assert any(node.refusal is not None and "gradients" in node.refusal[0] for node in program.nodes)


def test_the_table_of_schemas_is_torchs() -> None:
    table = dict.fromkeys(data_text("aten_schemas.txt").splitlines())
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and str(schema).removeprefix("aten::") in table:
            target = f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
            ours = schema_of(target)
            assert ours is not None
            assert [(p.name, p.is_written) for p in ours.parameters] == [
                (p.name, bool(p.alias_info and p.alias_info.is_write)) for p in schema.arguments
            ], target
            del table[str(schema).removeprefix("aten::")]
    assert not table
