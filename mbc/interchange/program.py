"""A program as plain data, which `pt2` and `from_onnx` read and `translate` translates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A size that is unknown before the program runs, with its name in the program."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and type of a tensor.

    `dtype` is PyTorch's name, such as `float32`. `strides` count elements; None if they are not known.
    """

    shape: tuple[int | Dynamic, ...]
    dtype: str
    device: str = "cpu"
    trained: bool = False
    strides: tuple[int, ...] | None = None

    @property
    def static(self) -> bool:
        """True if all sizes are known."""
        return all(isinstance(size, int) for size in self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a tensor that is `static`."""
        return tuple(size for size in self.shape if isinstance(size, int))


@dataclass(frozen=True, slots=True)
class TensorName:
    """An argument that is a tensor."""

    name: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that only messages show: a symbolic number, a nested graph, an object of a custom class."""

    what: str


@dataclass(frozen=True, slots=True)
class Subgraph:
    """An argument that is a graph: the body of a region such as `with torch.no_grad()`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    tensors: Mapping[str, TensorMeta]


Argument = None | bool | int | float | str | TensorName | Opaque | Subgraph | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: its `path` in `named_modules()`, its class's `name`, and a `key` unique to the call."""

    key: str
    path: str
    name: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the model's code."""

    file: str
    number: int
    code: str


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Attributes:
        target: The operation, such as `aten.conv2d.default`.
        arguments: The arguments by name.
        outputs: The names of all results.
        modules: The module calls around the operation, outermost first.
        line: The line of the model's code.
        name: The node's name in messages, if the file gives it one.
        shown: The operation's name in messages, if it is not `target`.
        refusal: Why the reader could not make an operation of the node, and a remedy.
        has_gradients: Whether gradients flow through the operation.
    """

    target: str
    arguments: Mapping[str, Argument]
    outputs: tuple[str, ...]
    modules: tuple[ModuleCall, ...] = ()
    line: Line | None = None
    name: str = ""
    shown: str = ""
    refusal: tuple[str, str] | None = None
    has_gradients: bool = True


def tensors_of(argument: Argument) -> tuple[str, ...]:
    """Return the names of the tensors in an argument."""
    if isinstance(argument, tuple):
        return tuple(name for item in argument for name in tensors_of(item))
    return (argument.name,) if isinstance(argument, TensorName) else ()


def operands_of(node: Node) -> tuple[str, ...]:
    """Return the names of the tensors that a node takes."""
    return tuple(name for argument in node.arguments.values() for name in tensors_of(argument))


def with_names(node: Node, rename: Callable[[str], str]) -> Node:
    """Return a node with the names of its operands changed: `rename` returns the new name of each."""

    def renamed(argument: Argument) -> Argument:
        if isinstance(argument, tuple):
            return tuple(map(renamed, argument))
        return TensorName(rename(argument.name)) if isinstance(argument, TensorName) else argument

    return replace(node, arguments={key: renamed(argument) for key, argument in node.arguments.items()})


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter, buffer or constant of the model; `key` is its key in `state_dict()`.

    Keys of one tensor share `storage`.
    """

    key: str
    kind: str  # parameter | buffer | constant
    meta: TensorMeta
    storage: str
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Program:
    """A program that was exported from a model.

    Attributes:
        inputs: The names of the inputs.
        held: The parameters, buffers and constants, by their names in the program.
        nodes: The operations, each after its operands.
        outputs: The tensors that the model returns, in order.
        tensors: Shape and type of each tensor.
        mutated: Keys of buffers and names of inputs that the program changes.
        arrays: The numbers, by `storage`.
        writer: The program that wrote the file, for comments in the source.
        counts: How much a step increases buffers that count calls, by `storage`.
        is_training: Whether the model was in training mode as a whole; the nodes may show the same.
        opaque: A line of the model that may apply a function with its own backward pass, which the program lacks.
    """

    inputs: tuple[str, ...]
    held: Mapping[str, Held]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, TensorMeta]
    mutated: tuple[str, ...]
    arrays: Mapping[str, Array]
    writer: str = ""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    opaque: Line | None = None
    is_training: bool = False


FLOATING = frozenset(("float64", "float32", "float16", "bfloat16"))
NUMPY: Mapping[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"), "int8": np.dtype("i1"), "int16": np.dtype("<i2"), "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"), "float16": np.dtype("<f2"), "float32": np.dtype("<f4"), "float64": np.dtype("<f8"),
    "bool": np.dtype("?"), "bfloat16": np.dtype("<u2"),
}  # fmt: skip
