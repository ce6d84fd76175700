"""Network -> TrainingGraph: types of a precision, backward pass, end of the step, and the inference graph.

Names: gradients are `d.<value>`, states after the step `next.<state>`, working copies `<dtype>.<value>`, values and
operations of the inference graph `infer.<…>`, optimizer states `<parameter>.<momentum | m | v>`, moving averages
`<state>.ema`, gradients that are kept without an optimizer `gradient.<parameter>`, sums over mini-batches
`before.<value>` and `accumulated.<value>`, copies of these and of the control block `copy.<value>`, sums over ranks
`sum.<value>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from mbc.errors import MbcError
from mbc.ir.control import INITIAL_LOSS_SCALE
from mbc.ir.graph import (
    NO_OPTIMIZER,
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
from mbc.ir.kept_gradients import gradient_name, has_gradient
from mbc.ir.metrics import MEAN_SQUARE, PART_SQUARE, value_of
from mbc.ir.types import Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.activation import Scale
from mbc.ops.base import NoAttributes
from mbc.ops.batch_normalize import MOST_RANKS
from mbc.ops.collective import AllReduce
from mbc.ops.control_record import CONTROL_TYPE
from mbc.ops.inner_product import INNER_PRODUCT
from mbc.ops.loss import WeightedSum
from mbc.ops.normalization import is_synchronised
from mbc.ops.reduce import Reduce
from mbc.ops.update import Guard
from mbc.passes.commute_relu_pool import relu_behind_pool
from mbc.passes.concat_statistics import statistics_by_part
from mbc.passes.copy_control import copy_control
from mbc.passes.detached import without_detached
from mbc.passes.drop_biases import without_vain_biases
from mbc.passes.expand import FLOATING, Expander
from mbc.passes.gather_operands import gather_operands
from mbc.passes.graph_builder import GraphBuilder, live_operations
from mbc.passes.optimizer_update import averages, updated
from mbc.passes.order_operations import order_operations
from mbc.passes.reverse_mode import Backward
from mbc.passes.rms_norms import join_rms_norms
from mbc.passes.shard_optimizer import shard_optimizer
from mbc.passes.stack_sums import sum_parts
from mbc.passes.sum_convolutions import sum_convolutions


def differentiate(
    network: Network, optimizer: Optimizer, precision: Precision, ranks: Ranks | None = None, shard: bool = False
) -> TrainingGraph:
    """Return one training step of a network and its inference graph.

    The state of the control block is `constant`; its `value` is the initial loss scale.

    Args:
        network: The network. Its mini-batch is the rows of one rank.
        optimizer: The optimizer.
        precision: The precision.
        ranks: Ranks that share a global mini-batch; None for one GPU.
        shard: Whether the optimizer's states are sharded over ranks, if all ranks run one plan.

    Raises:
        MbcError: MBC050 without a loss, MBC051 if the loss depends on no parameter, MBC052 for nesterov without
            momentum or for settings of an update without an optimizer, MBC067 for batch normalisation synchronised
            over too many ranks, MBC310 for a noise scale without equal parts.
    """
    if not network.losses:
        raise MbcError(
            "MBC050",
            f"network '{network.name}' has no loss, so there is nothing to train",
            "add a line such as: loss (logits, target) |> softmax_cross_entropy",
        )
    if optimizer.kind in ("sgd", "lars") and optimizer.nesterov and not optimizer.momentum:
        raise MbcError("MBC052", "nesterov needs momentum", "set sgd(momentum=0.9, nesterov=true)")

    if optimizer.kind == NO_OPTIMIZER:
        _check_no_update(optimizer, ranks)
    elif optimizer.input_gradients:
        raise MbcError("MBC052", "input_gradients is for steps without an optimizer", "set optimizer = none")
    if ranks is not None and ranks.size > MOST_RANKS and any(is_synchronised(op) for op in network.operations):
        raise MbcError(
            "MBC067",
            f"batch normalization is synchronised over {ranks.size} GPUs, but at most {MOST_RANKS} are possible",
            "remove sync_batch_norm and bn(sync=true): with so many rows, the statistics of each GPU suffice",
        )

    if optimizer.noise_scale:
        _check_parts(optimizer.accumulate, ranks)

    network = join_rms_norms(sum_parts(sum_convolutions(network)))
    network, vain = without_vain_biases(network)
    values = _outer_values(network, precision)
    train = GraphBuilder(values)
    scale = INITIAL_LOSS_SCALE if precision is Precision.FP16 else 1.0
    control = train.declare("control", CONTROL_TYPE, Role.CONTROL)

    # Forward pass: only the operations on which losses, metrics and outputs depend.
    share = 1.0 if ranks is None else ranks.share
    weights: dict[str, float] = {}
    for loss, weight in network.losses:
        weights[loss] = weights.get(loss, 0.0) + weight * share
    measured = [value for _, terms in network.metrics for value, _ in terms]
    live = live_operations(network.operations, (*weights, *measured, *network.outputs))
    read = {v for op in live_operations(network.operations, network.outputs) for v in op.inputs}
    parameters = {name for name in values if has_gradient(optimizer, values[name])} - ({*network.inputs} - read)
    trained = _trained(live, parameters, tuple(weights))
    forward = Expander(train, control, precision.working, trained.__contains__, True, ranks)
    current: dict[str, str] = {}
    # If another program computes the loss, all else that the forward pass does precedes it. Statistics change there
    # without an optimizer only, since an optimizer's guard waits for the loss.
    has_no_update = optimizer.kind == NO_OPTIMIZER
    last = [op for op in live if op.kind == INNER_PRODUCT or (has_no_update and KINDS[op.kind].loss)]
    for op in live:
        if op not in last:
            forward.write(op)
    if has_no_update:
        _finish_states(train, forward, current)
    for op in last:
        forward.write(op)
    here = {forward.read(loss): weight for loss, weight in weights.items()}
    metrics = tuple(m for op in train.operations if op.outputs[0] in here for m in op.outputs[1:])
    outputs = tuple(forward.read(v) for v in network.outputs)
    backward = Backward(train, here, parameters, control, forward.casts)
    total = _total(train, here)
    metrics += tuple(_metric(train, forward, name, terms, share) for name, terms in network.metrics)

    gradients = backward.run()
    for bias in filter(parameters.__contains__, vain):
        (gradients[bias],) = train.emit("scale", Scale(0.0), (bias,), f"d.{bias}", span=values[bias].span)
    states = [*network.states]
    if optimizer.noise_scale:
        # The loss of a rank, and so its gradient, is multiplied by `share`.
        metrics += (_square(train, PART_SQUARE, gradients, 1 / share),)
    checked = control
    if optimizer.accumulate > 1:
        # Every mini-batch updates running statistics, and only its own loss is known then.
        (checked,) = train.emit("check_loss", NoAttributes(), (control, total), "check_loss")
        total, *metrics = (_accumulated(train, control, states, current, figure) for figure in (total, *metrics))
        gradients = {p: _accumulated(train, control, states, current, gradient) for p, gradient in gradients.items()}
    if optimizer.accumulate > 1 and ranks is not None:
        # Values that are summed over ranks are in a bucket and are overwritten, so the states are copied.
        total, *metrics = (_copied(train, figure) for figure in (total, *metrics))
        gradients = {parameter: _copied(train, gradient) for parameter, gradient in gradients.items()}
    if ranks is not None:
        # The order is that of completion, so that the first gradients are sent while the last are computed.
        total, *metrics = (_over_ranks(train, ranks, figure) for figure in (total, *metrics))
        gradients = {parameter: _over_ranks(train, ranks, gradient) for parameter, gradient in gradients.items()}
    if optimizer.noise_scale:
        # Gradients are sums over mini-batches, but their mean counts. A metric is divided once by the number of
        # mini-batches, when it is read.
        metrics = (*metrics, _square(train, MEAN_SQUARE, gradients, 1 / optimizer.accumulate))
    if not gradients:
        frozen = bool(optimizer.frozen)
        raise MbcError(
            "MBC051",
            f"the loss of network '{network.name}' depends on no parameter" + (" that is not frozen" * frozen),
            "put a layer with parameters (conv, linear, bn) between an input and the loss",
        )

    if has_no_update:
        states += _kept_gradients(train, control, gradients, current)
    else:
        # End of the step: no operation changes a state before `guard` has read the loss.
        seen = tuple(gradients.values()) if precision is Precision.FP16 or optimizer.clip_norm else ()
        guard = Guard(optimizer.clip_norm, optimizer.accumulate)
        (after,) = train.emit("guard", guard, (control, total, *seen), "guard", (f"next.{control}",))
        current[control] = after if optimizer.accumulate == 1 else checked
        _finish_states(train, forward, current)
        current[control] = after
        states += updated(train, optimizer, gradients, current)
        states += averages(train, optimizer, network.states, after, current)
    states.append(State(control, Initializer("constant", scale)))
    updates = tuple((s.value, current[s.value]) for s in states if s.value in current)

    # Inference, over the same states.
    infer = GraphBuilder(values, "infer.")
    inference = Expander(infer, control, precision.working, lambda _: False, training=False)
    for op in live_operations(network.operations, network.outputs):
        inference.write(op)
    infer_outputs = tuple(inference.read(v) for v in network.outputs)
    inferred = without_detached(infer.operations, infer_outputs)
    read = {v for op in inferred for v in op.inputs}.union(infer_outputs)

    wanted = (total, *metrics, *outputs, *(after for _, after in updates))
    kept = without_detached(live_operations(train.operations, wanted), wanted)
    kept = relu_behind_pool(kept, values, wanted)
    kept = gather_operands(statistics_by_part(kept, values), values, ranks)
    kept = copy_control(kept, values)
    # All ranks need one order of their collectives. A step that is cut at its outputs computes them first.
    if ranks is None and not last:
        kept = order_operations(kept, values)
    kept = shard_optimizer(kept, values, ranks if shard and not optimizer.noise_scale else None)
    return TrainingGraph(
        network.name,
        network.batch,
        precision,
        optimizer,
        _used(values, (*kept, *inferred)),
        tuple(kept),
        tuple(inferred),
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


def _check_parts(accumulate: int, ranks: Ranks | None) -> None:
    rows = (1,) if ranks is None else ranks.rows
    if accumulate * len(rows) > 1 and len(set(rows)) == 1:
        return
    why = "one mini-batch of one GPU is one part" if len(rows) == 1 else "the GPUs have different numbers of rows"
    raise MbcError(
        "MBC310",
        f"noise_scale needs gradients of two or more equal parts of a step, but {why}",
        "set accumulate = 2, with half of the batch, or remove noise_scale",
    )


def _outer_values(network: Network, precision: Precision) -> dict[str, Value]:
    """Return inputs and states in the types of the precision: floating ones have the master type."""
    outer: dict[str, Value] = {}
    for name in (*network.inputs, *(s.value for s in network.states)):
        value = network.values[name]
        dtype = precision.master if value.type.dtype in FLOATING else value.type.dtype
        kind = TensorType(value.type.shape, dtype)
        outer[name] = Value(name, kind, value.role, value.per_sample, value.span)
    return outer


def _trained(operations: Sequence[Operation], parameters: set[str], losses: tuple[str, ...]) -> set[str]:
    """Return the values of the Network whose gradients are needed: those between one of `parameters` and a loss."""
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
    """Return the value of a metric of the source; with several ranks, the share of this rank's rows."""
    weights = WeightedSum(tuple(weight * share for _, weight in terms))
    values = [forward.read(value) for value, _ in terms]
    return builder.emit("weighted_sum", weights, values, value_of(name), (value_of(name),))[0]


def _square(builder: GraphBuilder, name: str, gradients: Mapping[str, str], weight: float) -> str:
    """Return `weight` times the squared norm of all gradients together, as a metric."""
    metric = value_of(name)
    squares: list[str] = []
    for parameter, gradient in gradients.items():
        of = builder.values[gradient]
        every = Reduce(tuple(range(1, len(of.type.shape))), (1,))
        square = f"{metric}.{parameter}"
        squares += builder.emit("row_reduce_dot", every, (gradient, gradient), square, (square,), of.span)
    return builder.emit("weighted_sum", WeightedSum((weight,) * len(squares)), squares, metric, (metric,))[0]


def _copied(builder: GraphBuilder, value: str) -> str:
    name = f"copy.{value}"
    return builder.emit("scale", Scale(1.0), (value,), name, (name,), builder.values[value].span)[0]


def _accumulated(builder: GraphBuilder, control: str, states: list[State], current: dict[str, str], value: str) -> str:
    """Return the sum of a value over the mini-batches of a step until now; its state is appended."""
    of = builder.values[value]
    before = builder.declare(f"before.{value}", of.type, Role.GRADIENT, span=of.span)
    name = f"accumulated.{value}"
    (after,) = builder.emit("accumulate", NoAttributes(), (before, value, control), name, (name,), of.span)
    states.append(State(before, Initializer("constant")))
    current[before] = after
    return after


def _over_ranks(builder: GraphBuilder, ranks: Ranks, value: str) -> str:
    name = f"sum.{value}"
    span = builder.values[value].span
    return builder.emit("all_reduce", AllReduce(ranks.size), (value,), f"{name}.all_reduce", (name,), span)[0]


def _finish_states(builder: GraphBuilder, forward: Expander, current: dict[str, str]) -> None:
    """Append the deferred operations of the forward pass, which change running statistics."""
    for late in forward.deferred:
        inputs = tuple(current.get(v, v) for v in late.inputs)
        results = builder.emit(late.kind, late.attributes, inputs, late.name, late.outputs, late.span)
        current.update({late.inputs[old]: results[new] for new, old in KINDS[late.kind].updates})


def _kept_gradients(
    builder: GraphBuilder, control: str, gradients: Mapping[str, str], current: dict[str, str]
) -> list[State]:
    """Append the operations that keep each gradient in a state, or add it there, and return the states."""
    states: list[State] = []
    for parameter, gradient in gradients.items():
        of = builder.values[gradient]
        state = builder.declare(gradient_name(parameter), of.type, Role.GRADIENT, span=of.span)
        name = f"next.{state}"
        (after,) = builder.emit("accumulate", NoAttributes(), (state, gradient, control), name, (name,), of.span)
        states.append(State(state, Initializer("constant")))
        current[state] = after
    return states


def _check_no_update(optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Raise MBC052 for settings of an update, which a step without an optimizer does not make.

    Raises:
        MbcError: MBC052.
    """
    others = [f.name for f in fields(optimizer) if f.name not in ("kind", "frozen", "input_gradients")]
    given = [name for name in others if getattr(optimizer, name) != getattr(Optimizer(), name)]
    if given or ranks is not None:
        what = given[0] if given else "more than one GPU"
        raise MbcError("MBC052", f"{what} needs an optimizer, but there is none", f"name one, or do without {what}")


def _used(values: dict[str, Value], operations: Sequence[Operation]) -> dict[str, Value]:
    """Return the values without those of operations that were dropped."""
    results = {v for op in operations for v in op.outputs}
    return {n: v for n, v in values.items() if v.role is not Role.INTERMEDIATE or n in results}
