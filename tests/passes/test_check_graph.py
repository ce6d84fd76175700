"""Every invalid graph is refused, and the message names the operation or value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.ir.graph import Network, Operation, Optimizer, Role, TrainingGraph, Value
from mbc.ir.types import DType, Precision, TensorType
from mbc.ops.base import NoAttributes
from mbc.ops.pooling import MaxPool
from mbc.ops.update import Guard
from mbc.passes.check_graph import verify_network, verify_training
from mbc.passes.training_step import differentiate
from tests.ir.networks import small

NETWORK = small()
GRAPH = differentiate(NETWORK, Optimizer(momentum=0.9), Precision.BF16)


def _operation(graph: TrainingGraph, which: str, /, **changes: Any) -> TrainingGraph:
    """Return the graph with one operation of its training program changed."""
    assert any(op.name == which for op in graph.train)
    return replace(graph, train=tuple(replace(op, **changes) if op.name == which else op for op in graph.train))


def _value(graph: TrainingGraph, name: str, **changes: Any) -> TrainingGraph:
    return replace(graph, values={**graph.values, name: replace(graph.values[name], **changes)})


def _append(graph: TrainingGraph, *operations: Operation) -> TrainingGraph:
    return replace(graph, train=(*graph.train, *operations))


def _again(graph: TrainingGraph, name: str) -> Operation:
    return next(op for op in graph.train if op.name == name)


Change = Callable[[TrainingGraph], TrainingGraph]
WRONG: dict[str, tuple[Change, str]] = {
    "name of a value": (
        lambda g: replace(g, values={**g.values, 'x"; y': Value('x"; y', TensorType((1,), DType.FP32))}),
        "MBC053: 'x\"; y' is not a legal name of a value",
    ),
    "name of an operation": (
        lambda g: _operation(g, "relu1", name="relu1\n"),
        "MBC053: 'relu1\\n' is not a legal name of an operation",
    ),
    "look-alike letters": (
        lambda g: _operation(g, "relu1", name="rеlu1"),
        "MBC053: 'rеlu1' is not a legal name of an operation",
    ),
    "unknown kind": (
        lambda g: _operation(g, "relu1", kind="rule"),
        "MBC054: operation 'relu1' has the unknown kind 'rule'",
    ),
    "attributes": (
        lambda g: _operation(g, "pool1", attributes=NoAttributes()),
        "MBC055: operation 'pool1' has NoAttributes, but 'max_pool' takes MaxPool",
    ),
    "a setting that is no plain value": (
        lambda g: _operation(g, "pool1", attributes=MaxPool([8, 8], (2, 2), (2, 2))),  # pyright: ignore[reportArgumentType]
        "MBC055: operation 'pool1': setting 'size' cannot be [8, 8]",
    ),
    "no such value": (
        lambda g: _operation(g, "relu1", inputs=("nobody",)),
        "MBC056: operation 'relu1' names 'nobody', but there is no such value",
    ),
    "before it has a value": (
        lambda g: _operation(g, "relu1", inputs=("d.bn1",)),
        "MBC056: operation 'relu1' reads 'd.bn1' before it has a value",
    ),
    "defined twice": (
        lambda g: _append(g, replace(_again(g, "relu1"), name="again")),
        "MBC057: value 'relu1' is defined twice",
    ),
    "type": (
        lambda g: _value(g, "relu1", type=TensorType((4, 4, 8, 8), DType.FP32)),
        "MBC058: operation 'relu1': output 'relu1' is fp32[4, 4, 8, 8], but must be bf16[4, 4, 8, 8]",
    ),
    "number of outputs": (
        lambda g: _operation(g, "pool1", outputs=("pool1",)),
        "MBC058: operation 'pool1' has 1 outputs, but needs 2",
    ),
    "empty shape": (
        lambda g: _value(g, "relu1", type=TensorType((0, 4), DType.FP32)),
        "MBC058: value 'relu1' has the empty shape (0, 4)",
    ),
    "shapes": (
        lambda g: _operation(g, "conv1", inputs=("bf16.image", "bn1.weight")),
        "MBC059: operation 'conv1': filter fp32[4] does not fit a kernel of 3 x 3 in 1 group(s)",
    ),
    "number of operands": (
        lambda g: _operation(g, "conv1", inputs=("bf16.image",)),
        "MBC059: operation 'conv1': 'convolution' cannot take the operands (bf16[4, 1, 8, 8])",
    ),
    "role": (
        lambda g: _value(g, "relu1", role=Role.PARAMETER),
        "MBC060: operation 'relu1' writes 'relu1', which is parameter",
    ),
    "role of an input": (
        lambda g: _value(g, "image", role=Role.STATISTIC),
        "MBC060: value 'image' is listed as input, but is statistic",
    ),
    "updated twice": (
        lambda g: _append(g, replace(_again(g, "head.bias.update"), name="again", outputs=("next.a", "next.b"))),
        "MBC056: operation 'again' names 'next.a', but there is no such value",
    ),
    "update of another": (
        lambda g: replace(g, updates=(("head.bias", "next.conv1.weight"), *g.updates[1:])),
        "MBC061: state 'head.bias' should become 'next.conv1.weight', but becomes 'next.head.bias'",
    ),
    "update of no state": (
        lambda g: replace(g, updates=(("image", "relu1"), *g.updates)),
        "MBC061: 'image' is updated, but is not a state",
    ),
    "update left out": (
        lambda g: replace(g, updates=g.updates[1:]),
        "MBC061: 'conv1.weight' is changed, but is not a state that the graph updates",
    ),
    "loss": (lambda g: replace(g, loss="relu1"), "MBC062: loss 'relu1' is bf16[4, 4, 8, 8], not one number"),
    "operation twice": (
        lambda g: _operation(g, "relu1", name="pool1"),
        "MBC063: there are two operations called 'pool1'",
    ),
    "rows": (
        lambda g: _value(g, "relu1", per_sample=False),
        "MBC064: operation 'relu1' computes 'relu1' with rows of the mini-batch",
    ),
    "another mini-batch": (lambda g: replace(g, batch=5), "MBC064: value 'image' has 4 rows in a mini-batch of 5"),
    "output": (lambda g: replace(g, outputs=("infer.relu1",)), "MBC065: no operation computes output 'infer.relu1'"),
    "left over": (
        lambda g: replace(g, values={**g.values, "x": Value("x", TensorType((1,), DType.FP32))}),
        "MBC065: no operation computes value 'x'",
    ),
    "input of inference": (
        lambda g: replace(g, infer_inputs=("conv1.weight",)),
        "MBC065: input 'conv1.weight' of the inference graph is not an input of the network",
    ),
    "outputs of inference": (
        lambda g: replace(g, infer_outputs=()),
        "MBC065: the inference graph has another number of outputs than the training graph",
    ),
    "a state changes in inference": (
        lambda g: replace(
            g,
            infer=(*g.infer, Operation("x", "guard", ("control",), ("x",), Guard())),
            values={**g.values, "x": replace(g.values["next.control"], name="x")},
        ),
        "MBC061: operation 'x' of the inference graph changes a state",
    ),
    "not executable": (
        lambda g: replace(g, train=NETWORK.operations),
        "MBC066: operation 'bn1': 'batch_norm' exists in networks only",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_faults_are_named(case: str) -> None:
    change, message = WRONG[case]
    changed = change(GRAPH)
    if case == "not executable":  # in the types of a network, so that the kind alone is wrong
        changed = replace(differentiate(NETWORK, Optimizer(), Precision.FP32), train=NETWORK.operations)
    with pytest.raises(MbcError) as error:
        verify_training(changed)
    assert str(error.value).splitlines()[0] == f"error {message}"


def test_a_second_update_of_a_state() -> None:
    update = _again(GRAPH, "head.bias.update")
    names = tuple(f"{v}.again" for v in update.outputs)
    values = {
        **GRAPH.values,
        **{n: replace(GRAPH.values[v], name=n) for n, v in zip(names, update.outputs, strict=True)},
    }
    changed = replace(_append(GRAPH, replace(update, name="again", outputs=names)), values=values)
    with pytest.raises(MbcError, match=r"MBC061: operation 'again' updates 'head\.bias' a second time"):
        verify_training(changed)


def test_a_loss_of_a_network_comes_from_a_loss_operation() -> None:
    with pytest.raises(MbcError, match="MBC062: 'relu1' is used as a loss, but comes from no loss operation"):
        verify_network(replace(NETWORK, losses=(("relu1", 1.0),)))


def test_an_output_of_a_network_must_exist() -> None:
    with pytest.raises(MbcError, match="MBC065: no operation computes output 'nobody'"):
        verify_network(replace(NETWORK, outputs=("nobody",)))


def test_good_graphs_pass() -> None:
    checked: Network = NETWORK
    verify_network(checked)
    verify_training(GRAPH)
