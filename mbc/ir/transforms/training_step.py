"""Network -> TrainingGraph: types of a precision, backward pass, end of the step, and the inference graph.

Names: gradients are `d.<value>`, states after the step `next.<state>`, working copies `<dtype>.<value>`, values and
operations of the inference graph `infer.<…>`, optimizer states `<parameter>.<momentum | m | v>`, sums over ranks
`sum.<value>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mbc.errors import MbcError
from mbc.ir.build import GraphBuilder, live_operations
from mbc.ir.control import INITIAL_LOSS_SCALE
from mbc.ir.graph import (
    Attributes,
    Initializer,
    Network,
    Operation,
    Optimizer,
    Ranks,
    Role,
    State,
    TrainingGraph,
    Value,
)
from mbc.ir.metrics import value_of
from mbc.ir.parameter_groups import is_trained, settings_of
from mbc.ir.transforms.commute_relu_pool import relu_behind_pool
from mbc.ir.transforms.concat_statistics import statistics_by_part
from mbc.ir.transforms.expand import FLOATING, Expander
from mbc.ir.transforms.gather_operands import gather_operands
from mbc.ir.transforms.reverse_mode import Backward
from mbc.ir.transforms.shard_optimizer import shard_optimizer
from mbc.ir.types import Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.collective import AllReduce
from mbc.ops.control import CONTROL_TYPE
from mbc.ops.loss import WeightedSum
from mbc.ops.normalization import MOST_RANKS, is_synchronised
from mbc.ops.update import AdamW, Guard, Sgd


def differentiate(
    network: Network, optimizer: Optimizer, precision: Precision, ranks: Ranks | None = None, shard: bool = False
) -> TrainingGraph:
    """One training step of `network` and its inference graph; of one rank, whose rows are the network's mini-batch,
    where several (`ranks`) share a global one. `shard`: the optimizer's states over ranks, where these run one plan.

    The state of the control block is `constant`; its `value` is the loss scale to start with.
    Raises MBC050 without a loss, MBC051 when the loss depends on no parameter, MBC052 for nesterov without momentum,
    MBC067 for batch normalisation synchronised over too many ranks.
    """
    if not network.losses:
        raise MbcError(
            "MBC050",
            f"network '{network.name}' has no loss, so there is nothing to train",
            "add a line such as: loss (logits, target) |> softmax_cross_entropy",
        )
    if optimizer.kind == "sgd" and optimizer.nesterov and not optimizer.momentum:
        raise MbcError("MBC052", "nesterov needs momentum", "set sgd(momentum=0.9, nesterov=true)")

    if ranks is not None and ranks.size > MOST_RANKS and any(is_synchronised(op) for op in network.operations):
        raise MbcError(
            "MBC067",
            f"batch normalization is synchronised over {ranks.size} GPUs, but over {MOST_RANKS} at most can be",
            "leave sync_batch_norm and bn(sync=true) out: with so many rows each GPU's own are enough",
        )

    values = _outer_values(network, precision)
    train = GraphBuilder(values)
    scale = INITIAL_LOSS_SCALE if precision is Precision.FP16 else 1.0
    control = train.declare("control", CONTROL_TYPE, Role.CONTROL)

    # Forward: only what the losses and outputs depend on.
    share = 1.0 if ranks is None else ranks.share
    weights: dict[str, float] = {}
    for loss, weight in network.losses:
        weights[loss] = weights.get(loss, 0.0) + weight * share
    measured = [value for _, terms in network.metrics for value, _ in terms]
    live = live_operations(network.operations, (*weights, *measured, *network.outputs))
    parameters = {name for name, value in values.items() if is_trained(optimizer, value)}
    trained = _trained(live, parameters, tuple(weights))
    forward = Expander(train, control, precision.working, trained.__contains__, True, ranks)
    for op in live:
        forward.write(op)
    here = {forward.read(loss): weight for loss, weight in weights.items()}
    metrics = tuple(m for op in train.operations if op.outputs[0] in here for m in op.outputs[1:])
    outputs = tuple(forward.read(v) for v in network.outputs)
    backward = Backward(train, here, parameters, control, forward.casts)
    total = _total(train, here)
    metrics += tuple(_metric(train, forward, name, terms, share) for name, terms in network.metrics)

    gradients = backward.run()
    if ranks is not None:
        # In the order in which they are ready, so that the first can travel while the last are computed.
        total, *metrics = (_over_ranks(train, ranks, figure) for figure in (total, *metrics))
        gradients = {parameter: _over_ranks(train, ranks, gradient) for parameter, gradient in gradients.items()}
    if not gradients:
        frozen = bool(optimizer.frozen)
        raise MbcError(
            "MBC051",
            f"the loss of network '{network.name}' depends on no parameter" + (" that is not frozen" * frozen),
            "put a layer with parameters (conv, linear, bn) between an input and the loss",
        )

    # End of the step: nothing changes a state before `guard` has seen the loss.
    seen = tuple(gradients.values()) if precision is Precision.FP16 or optimizer.clip_norm else ()
    (after,) = train.emit("guard", Guard(optimizer.clip_norm), (control, total, *seen), "guard", (f"next.{control}",))
    current = {control: after}
    for late in forward.deferred:
        inputs = tuple(current.get(v, v) for v in late.inputs)
        made = train.emit(late.kind, late.attributes, inputs, late.name, late.outputs, late.span)
        current.update({late.inputs[old]: made[new] for new, old in KINDS[late.kind].updates})
    states = [*network.states]
    for parameter, gradient in gradients.items():
        states += _update(train, optimizer, parameter, gradient, after, current)
    states.append(State(control, Initializer("constant", scale)))
    updates = tuple((s.value, current[s.value]) for s in states if s.value in current)

    # Inference, over the same states.
    infer = GraphBuilder(values, "infer.")
    inference = Expander(infer, control, precision.working, lambda _: False, training=False)
    for op in live_operations(network.operations, network.outputs):
        inference.write(op)
    infer_outputs = tuple(inference.read(v) for v in network.outputs)
    read = {v for op in infer.operations for v in op.inputs}.union(infer_outputs)

    wanted = (total, *metrics, *outputs, *(after for _, after in updates))
    kept = relu_behind_pool(live_operations(train.operations, wanted), values, wanted)
    kept = gather_operands(statistics_by_part(kept, values), values, ranks)
    kept = shard_optimizer(kept, values, ranks if shard else None)
    return TrainingGraph(
        network.name,
        network.batch,
        precision,
        optimizer,
        _used(values, (*kept, *infer.operations)),
        tuple(kept),
        tuple(infer.operations),
        tuple(states),
        network.inputs,
        tuple(v for v in network.inputs if v in read),
        outputs,
        infer_outputs,
        total,
        tuple(metrics),
        updates,
        ranks,
    )


def _outer_values(network: Network, precision: Precision) -> dict[str, Value]:
    """Inputs and states in the types of the precision: floating ones in the master type."""
    outer: dict[str, Value] = {}
    for name in (*network.inputs, *(s.value for s in network.states)):
        value = network.values[name]
        dtype = precision.master if value.type.dtype in FLOATING else value.type.dtype
        kind = TensorType(value.type.shape, dtype)
        outer[name] = Value(name, kind, value.role, value.per_sample, value.span)
    return outer


def _trained(operations: Sequence[Operation], parameters: set[str], losses: tuple[str, ...]) -> set[str]:
    """Values of the Network whose gradients will be asked for: between one of `parameters` and a loss."""
    trained = set(parameters)
    for op in operations:
        kind = KINDS[op.kind]
        if (kind.gradient or kind.expand) and not trained.isdisjoint(op.inputs):
            trained.update(op.outputs)
    reached = set(losses)
    for op in reversed(operations):
        if not reached.isdisjoint(op.outputs):
            reached.update(op.inputs)
    return trained & reached


def _total(builder: GraphBuilder, weights: dict[str, float]) -> str:
    if list(weights.values()) == [1.0]:
        return next(iter(weights))
    return builder.emit("weighted_sum", WeightedSum(tuple(weights.values())), tuple(weights), "total_loss")[0]


def _metric(
    builder: GraphBuilder, forward: Expander, name: str, terms: Sequence[tuple[str, float]], share: float
) -> str:
    """A metric of the source: of several ranks the part that is of this one's rows."""
    weights = WeightedSum(tuple(weight * share for _, weight in terms))
    values = [forward.read(value) for value, _ in terms]
    return builder.emit("weighted_sum", weights, values, value_of(name), (value_of(name),))[0]


def _over_ranks(builder: GraphBuilder, ranks: Ranks, value: str) -> str:
    name = f"sum.{value}"
    span = builder.values[value].span
    return builder.emit("all_reduce", AllReduce(ranks.size), (value,), f"{name}.all_reduce", (name,), span)[0]


def _update(
    builder: GraphBuilder,
    optimizer: Optimizer,
    parameter: str,
    gradient: str,
    guarded: str,
    current: dict[str, str],
) -> list[State]:
    """Append the update of one parameter, under the control block `guarded`; returns the optimizer's states for it."""
    value = builder.values[parameter]
    own = settings_of(optimizer, value)
    attributes: Attributes
    if optimizer.kind == "adamw":
        kind, suffixes = "adamw_update", ("m", "v")
        attributes = AdamW(
            optimizer.beta1, optimizer.beta2, optimizer.eps, own.weight_decay, own.rate, optimizer.clip_value
        )
    else:
        kind, suffixes = "sgd_update", ("momentum",) if optimizer.momentum else ()
        attributes = Sgd(optimizer.momentum, optimizer.nesterov, own.weight_decay, own.rate, optimizer.clip_value)
    memory = [builder.declare(f"{parameter}.{s}", value.type, Role.OPTIMIZER, span=value.span) for s in suffixes]
    names = [f"next.{v}" for v in (parameter, *memory)]
    inputs = (parameter, gradient, guarded, *memory)
    made = builder.emit(kind, attributes, inputs, f"{parameter}.update", names, value.span)
    current.update(zip((parameter, *memory), made, strict=True))
    return [State(v, Initializer("constant")) for v in memory]


def _used(values: dict[str, Value], operations: Sequence[Operation]) -> dict[str, Value]:
    """Without the values of operations that were dropped."""
    made = {v for op in operations for v in op.outputs}
    return {n: v for n, v in values.items() if v.role is not Role.INTERMEDIATE or n in made}
