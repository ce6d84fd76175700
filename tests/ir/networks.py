"""Networks written layer by layer, without the front end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mbc.ir.graph import Attributes, Initializer, Network, Operation, Role, State
from mbc.ir.types import DType, TensorType
from mbc.ops import LAYERS
from mbc.passes.graph_builder import GraphBuilder


class Writer:
    """Implements `mbc.ops.base.LayerBuilder`. `x = writer("conv", x, channels=8, kernel=3)` applies a layer."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.graph = GraphBuilder()
        self.states: list[State] = []
        self.inputs: list[str] = []
        self._path = ""
        self._known: set[str] = set()
        self._count = 0

    def input(self, name: str, *sample_shape: int, classes: bool = False, pixels: bool = False) -> str:
        dtype = DType.INT32 if classes else DType.UINT8 if pixels else DType.FP32
        kind = TensorType((self.batch, *sample_shape), dtype)
        self.inputs.append(self.graph.declare(name, kind, Role.INPUT, per_sample=True))
        return name

    def parameter(self, name: str, *shape: int) -> str:
        """A trained tensor used directly as an operand."""
        self.states.append(State(name, Initializer("constant")))
        return self.graph.declare(name, TensorType(shape, DType.FP32), Role.PARAMETER)

    def __call__(self, layer: str, *inputs: str, path: str = "", **settings: Any) -> Any:
        """Apply a layer and return its value, or several. A repeated `path` shares the parameters."""
        self._count += 1
        self._path = path or f"{layer}{self._count}"
        definition = LAYERS[layer]
        assert definition.inputs[0] <= len(inputs) <= (definition.inputs[1] or math.inf)
        full = {p.name: settings.pop(p.name, p.default) for p in definition.parameters}
        assert not settings and None not in full.values()
        return definition.build(self, full, inputs)

    def type(self, value: str) -> TensorType:
        return self.graph.type(value)

    def has_rows(self, value: str) -> bool:
        return self.graph.values[value].per_sample

    def producer(self, value: str) -> Operation | None:
        return next((op for op in self.graph.operations if value in op.outputs), None)

    def state(self, suffix: str, shape: tuple[int, ...], initializer: Initializer, trained: bool = True) -> str:
        name = f"{self._path}.{suffix}" if suffix else self._path
        if name not in self._known:
            self._known.add(name)
            self.states.append(State(name, initializer))
            role = Role.PARAMETER if trained else Role.STATISTIC
            self.graph.declare(name, TensorType(shape, DType.FP32), role)
        return name

    def emit(self, kind: str, attributes: Attributes, inputs: Sequence[str], suffix: str = "") -> tuple[str, ...]:
        return self.graph.emit(kind, attributes, inputs, f"{self._path}.{suffix}" if suffix else self._path)

    def network(self, outputs: Sequence[str] = (), **losses: float) -> Network:
        return self.finish(outputs, tuple(losses.items()))

    def finish(self, outputs: Sequence[str], losses: Sequence[tuple[str, float]]) -> Network:
        return Network(
            "test",
            self.batch,
            dict(self.graph.values),
            tuple(self.graph.operations),
            tuple(self.states),
            tuple(self.inputs),
            tuple(outputs),
            tuple(losses),
        )


def small(batch: int = 4) -> Network:
    """Image -> conv, bn, relu, max-pool, linear -> cross entropy."""
    w = Writer(batch)
    image, target = w.input("image", 1, 8, 8), w.input("target", classes=True)
    x = w("conv", image, path="conv1", channels=4, kernel=3, pad=1)
    x = w("relu", w("bn", x, path="bn1"), path="relu1")
    x = w("maxpool", x, path="pool1", kernel=2)
    logits = w("linear", x, path="head", features=3)
    loss = w("softmax_cross_entropy", logits, target, path="loss1")
    return w.finish((logits,), ((loss, 1.0),))


def bottleneck_resnet(counts: Sequence[int], batch: int, size: int, width: int = 64, classes: int = 1000) -> Network:
    """A ResNet of 3 * sum(counts) + 2 layers."""
    w = Writer(batch)
    x, target = w.input("image", 3, size, size), w.input("target", classes=True)

    def conv_bn(x: str, channels: int, kernel: int, stride: int = 1) -> str:
        return w("bn", w("conv", x, channels=channels, kernel=kernel, stride=stride, pad=kernel // 2))

    x = w("maxpool", w("relu", conv_bn(x, width, 7, 2)), kernel=3, stride=2)
    for stage, count in enumerate(counts):
        channels = width * 2**stage
        for number in range(count):
            stride = 2 if stage and not number else 1
            y = w("relu", conv_bn(x, channels, 1, stride))
            y = w("relu", conv_bn(y, channels, 3))
            y = conv_bn(y, 4 * channels, 1)
            x = w("relu", w("add", y, x if number else conv_bn(x, 4 * channels, 1, stride)))
    logits = w("linear", w("global_avgpool", x), features=classes)
    return w.finish((logits,), ((w("softmax_cross_entropy", logits, target), 1.0),))
