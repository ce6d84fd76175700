"""Batch normalisation: the layer `bn`, in phases that `batch_normalize` has.

Ioffe and Szegedy, "Batch Normalization", 2015; the running variance is unbiased, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mbc.ir.graph import Attributes, Initializer, Network, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Expansion, Layer, LayerBuilder, NoAttributes, OpKind, Parameter, ShapeError
from mbc.ops.batch_normalize import BatchNormalize, CombineStatistics, UpdateRunning, channels, count_of, fitting
from mbc.ops.collective import AllGather


@dataclass(frozen=True, slots=True)
class BatchNorm(Attributes):
    """Settings of batch normalisation.

    Attributes:
        eps: Number that is added to the variance.
        momentum: Weight of the new statistics: running = (1 - momentum) * running + momentum * batch.
        affine: Whether there are a trained scale and shift.
        sync: Whether statistics are those of the mini-batch that all ranks share, rather than of each rank's own rows.
        frozen: Whether training normalises by the running statistics, as evaluation does, and leaves them unchanged.
        track: Whether there are running statistics. Without them evaluation uses statistics of the mini-batch.
    """

    eps: float = 1e-5
    momentum: float = 0.1
    affine: bool = True
    sync: bool = False
    frozen: bool = False
    track: bool = True

    def split(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return scale and shift, if there are, and the running statistics, if there are, of the operands behind x."""
        return tuple(operands[: 2 * self.affine]), tuple(operands[2 * self.affine :])


def _norm_shape(a: BatchNorm, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x = inputs[0]
    fitting(x, inputs[1:])
    if len(inputs) != 1 + 2 * a.affine + 2 * a.track:
        raise ShapeError(f"batch norm with affine = {a.affine} and track = {a.track} got {len(inputs)} operands")
    if count_of(x) < 2 and not a.frozen:
        raise ShapeError(f"batch norm of {x} has one value per channel, but a variance needs two")
    return (x,)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, BatchNorm)
    x, (affine, running) = op.inputs[0], a.split(op.inputs[1:])
    if a.frozen or (a.track and not training):
        return e.emit("batch_normalize", BatchNormalize(a.eps), (x, *running, *affine), op.outputs, op.name)
    y = op.outputs[0]
    names = (f"{y}.mean", f"{y}.variance")
    counts = (count_of(e.type(x)),)
    if not a.sync or e.ranks is None or not training:
        mean, variance = e.emit("batch_statistics", NoAttributes(), (x,), names, f"{op.name}.statistics")
    else:
        counts = tuple(rows * (count_of(e.type(x)) // e.type(x).shape[0]) for rows in e.ranks.rows)
        own = e.emit("batch_statistics", NoAttributes(), (x,), [f"{n}.own" for n in names], f"{op.name}.statistics")
        gather = AllGather(e.ranks.size)
        ranks = e.emit("all_gather", gather, own, [f"{n}.ranks" for n in names], f"{op.name}.statistics.all_gather")
        combine = CombineStatistics(counts)
        mean, variance = e.emit("combine_statistics", combine, ranks, names, f"{op.name}.statistics.combine")
    if running:
        update, inputs = UpdateRunning(a.momentum, sum(counts)), (*running, mean, variance, e.control)
        names = tuple(f"next.{name}" for name in running)
        updated = e.emit("update_running", update, inputs, names, f"{op.name}.update_running")
        for state, value in zip(running, updated, strict=True):
            e.update(state, value)
    return e.emit("batch_normalize", BatchNormalize(a.eps), (x, mean, variance, *affine), op.outputs, op.name)


def is_synchronised(op: Operation) -> bool:
    """Return whether this is a batch normalisation with the statistics of all ranks."""
    return isinstance(op.attributes, BatchNorm) and op.attributes.sync and not op.attributes.frozen


def synchronised(network: Network) -> Network:
    """Return the network with the statistics of all ranks in every batch normalisation."""
    operations = (
        replace(op, attributes=replace(op.attributes, sync=True)) if isinstance(op.attributes, BatchNorm) else op
        for op in network.operations
    )
    return replace(network, operations=tuple(operations))


OPS = (OpKind("batch_norm", BatchNorm, _norm_shape, expand=_expand),)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    (x,) = inputs
    shape = channels(builder.type(x)).shape
    a = BatchNorm(**settings)
    if a.eps <= 0:
        raise ShapeError(f"eps is {a.eps}, but must be positive")
    if not 0 <= a.momentum <= 1:
        raise ShapeError(f"momentum is {a.momentum}, but must be between 0 and 1")
    if a.frozen and not a.track:
        raise ShapeError("frozen statistics are running statistics: leave out track=false")
    operands = [x]
    if a.affine:
        operands.append(builder.state("weight", shape, Initializer("constant", 1.0)))
        operands.append(builder.state("bias", shape, Initializer("constant", 0.0)))
    if a.track:
        operands.append(builder.state("running_mean", shape, Initializer("constant", 0.0), trained=False))
        operands.append(builder.state("running_var", shape, Initializer("constant", 1.0), trained=False))
    return builder.emit("batch_norm", a, operands)[0]


LAYERS = (
    Layer(
        "bn",
        (
            Parameter("eps", "float", 1e-5),
            Parameter("momentum", "float", 0.1),
            Parameter("affine", "bool", True),
            Parameter("sync", "bool", False),
            Parameter("frozen", "bool", False),
            Parameter("track", "bool", True),
        ),
        _build,
        help="Batch normalisation. momentum is the weight of the newest mini-batch in the running statistics. "
        "sync: the statistics are those of the mini-batch that all GPUs share. frozen: training uses the running "
        "statistics and leaves them unchanged. track = false: there are none, and each mini-batch uses its own.",
    ),
)
