"""Models of PyTorch, exported to a file, and the results of the imported networks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.frontend.format import format_source
from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.interchange.importing import ImportedModel, import_model
from mbc.ir.graph import Network
from mbc.ir.types import Precision
from mbc.ops.base import Array
from mbc.passes.training_step import differentiate
from mbc.source import Source
from tests.ir.execution import execute, types_of

# As the types of a package that may be missing.
Tensor = Any
Model = Any


class _Absent:
    """PyTorch where it is not installed: what uses it is skipped, a test or a whole file."""

    def __getattr__(self, name: str) -> Any:
        pytest.skip("the imported models are made by PyTorch, which is not installed", allow_module_level=True)


try:
    torch: Any = importlib.import_module("torch")
except ImportError:
    torch = _Absent()
nn: Any = torch if isinstance(torch, _Absent) else torch.nn
_Module: Any = object if isinstance(torch, _Absent) else nn.Module


class Of(_Module):
    """A model that applies a function to the output of a convolution."""

    def __init__(self, function: Callable[..., Tensor], channels: int = 4, padding: int = 1, **held: Model) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=padding)
        self.function = function
        for name, module in held.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


def exported(path: Path, model: Model, *inputs: Tensor, train: bool = True, **options: object) -> Path:
    """Write the model's exported program, in training mode, to a file, and return its path."""
    file = path / "model.pt2"
    torch.export.save(torch.export.export(model.train(train), inputs, **options), file)
    return file


def stirred(model: Model) -> Model:
    """Draw the model's running statistics and scales, so that they differ from those of a new module."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype == torch.float32 and (tensor.ndim == 1 or "gamma" in name):
            tensor.data = torch.rand(tensor.shape, generator=generator) + 0.5
    return model


def lowered(text: str) -> Lowered:
    return lower(parse(Source("imported", text)))


def forward(model: ImportedModel, *inputs: Tensor | Array) -> list[Array]:
    """Return the outputs of the network in evaluation mode, in fp32."""
    lowered_model = lowered(model.source)
    graph = differentiate(lowered_model.network, lowered_model.optimizer, Precision.FP32)
    given: dict[str, Array] = {name: np.asarray(a, np.float32) for name, a in model.network.arrays.items()}
    given |= {name: np.asarray(x) for name, x in zip(graph.infer_inputs, inputs, strict=True)}
    env = execute(graph.infer, types_of(graph), given, graph.batch, Precision.FP32)
    return [env[name] for name in graph.infer_outputs]


def compared(path: Path, model: Model, *inputs: Tensor) -> ImportedModel:
    """Import the model; assert that results are torch's within 1e-5 and that `mbc fmt` leaves the source unchanged."""
    imported = import_model(exported(path, stirred(model), *inputs), "net", "mse")
    assert format_source(Source("net.mbc", imported.source)) == imported.source
    with torch.no_grad():
        wanted = model.eval()(*[x.clone() for x in inputs])
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    outputs = forward(imported, *inputs)
    assert len(outputs) == len(wanted)
    for ours, theirs in zip(outputs, wanted, strict=True):
        assert ours.shape == tuple(theirs.shape)
        reference = theirs.numpy()
        assert np.linalg.norm(ours - reference) <= 1e-5 * np.linalg.norm(reference)
    return imported


def signature(network: Network) -> tuple[Sequence[int], Sequence[int]]:
    """Return a signature of a network's computation, independent of the names of values and operations.

    The first part is a digest of each output. The second holds the digests of all results of operations, sorted.
    """
    digests: Mapping[str, int] = {v: hash(v) for v in (*network.inputs, *(s.value for s in network.states))}
    digest_of = dict(digests)
    for op in network.operations:
        own = hash((op.kind, repr(op.attributes), tuple(digest_of[v] for v in op.inputs)))
        digest_of |= {value: hash((own, number)) for number, value in enumerate(op.outputs)}
    operations = sorted(digest_of[v] for op in network.operations for v in op.outputs)
    return [digest_of[v] for v in network.outputs], operations
