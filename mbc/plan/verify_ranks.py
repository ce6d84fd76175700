"""The check of plans that share a mini-batch: what is summed over ranks is the same thing everywhere, in one order, and
every row of the global mini-batch is in it once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from mbc.errors import MbcError
from mbc.ir.graph import Operation, Ranks, Role, TrainingGraph
from mbc.kernels.nccl import (
    ALL_GATHER,
    ALL_REDUCE,
    BY_COPIES,
    COLLECTIVES,
    GATHER_PARTS,
    GATHER_ROWS,
    REDUCE_SCATTER,
    SHARDED,
    ctas_of,
    is_bucket,
    is_collective,
)
from mbc.ops import KINDS
from mbc.ops.collective import AllGather, AllReduce
from mbc.ops.dice import DiceMeanBackward
from mbc.ops.elementwise_loss import Backward as ElementwiseBackward
from mbc.ops.kl_divergence import KlBackward
from mbc.ops.layerwise import RATIOS
from mbc.ops.loss import CrossEntropyBackward, MseBackward
from mbc.ops.mean_iou import OVERLAP_MEAN
from mbc.ops.normalization import BatchNormalize, BatchNormalizeBackward, CombineStatistics, UpdateRunning
from mbc.ops.shard import UPDATES_OF_PARTS, ReduceScatter
from mbc.ops.soft_cross_entropy import SoftTargetBackward
from mbc.ops.top_k import TopKMean
from mbc.ops.weighted_cross_entropy import WeightedMean, WeightedMeanBackward
from mbc.plan.file import dump_plan
from mbc.plan.model import Plan, Stream

_ROUNDING = 1e-12
# The one kind that may read the rows of all ranks: it adds over rows alone, and so over ranks.
OF_ROWS = "linear_backward_filter"
_LossGradient = (
    CrossEntropyBackward
    | SoftTargetBackward
    | WeightedMeanBackward
    | KlBackward
    | MseBackward
    | ElementwiseBackward
    | DiceMeanBackward
)
STATISTICS = ("batch_statistics", "concat_statistics")  # kinds that compute those of a rank's rows
OF_SUMS = ("row_reduce_dot", "weighted_sum")  # kinds whose result is the same on all ranks where all operands are
_SAME = (Role.PARAMETER, Role.OPTIMIZER, Role.CONTROL)  # states that are the same on all ranks
_OF_A_STEP = (Role.INTERMEDIATE, Role.GRADIENT)  # what a rank computes of its own rows, if nothing is said of it
_REMEDY = "these plans are not what mbc writes for several GPUs: compile the source again"


def verify_rank(plan: Plan) -> None:
    """What holds of each plan alone: every gradient, what decides whether a step counts, and what it reports is summed
    over all ranks once, on the stream of collectives. MBC135; MBC136 for the parts of a sharded optimizer."""
    ranks, graph = plan.graph.ranks, plan.graph
    sums = _sums(graph)
    if ranks is None:
        shares = any(op.kind in COLLECTIVES for op in graph.train)
        if shares or any(map(is_collective, (*plan.train.launches, *plan.infer.launches))):
            _fail("it sums over ranks, and there is one only")
        return
    for op in graph.train:
        if isinstance(op.attributes, AllReduce | AllGather | ReduceScatter) and op.attributes.ranks != ranks.size:
            _fail(f"'{op.name}' is of {op.attributes.ranks} ranks of {ranks.size}")
        for name in _must_be_sums(graph, op):
            if name not in sums:
                _fail(f"'{op.name}' reads '{name}', which is of one rank alone")
    for name in (graph.loss, *graph.metrics):
        if name not in sums:
            _fail(f"the step reports '{name}', which is of one rank alone")
    _check_once(graph, sums)
    _check_shards(graph, ranks)
    _check_statistics(graph, ranks)
    _check_class_weights(graph, ranks)
    for i, launch in enumerate(plan.train.launches):
        if is_collective(launch) is not (launch.stream is Stream.COLLECTIVE):
            _fail(f"launch {i} of train is on the stream '{launch.stream}'")
    if any(map(is_collective, plan.infer.launches)):
        _fail("inference sums over ranks")


def verify_ranks(plans: Sequence[Plan]) -> None:
    """Plans of the ranks that share a mini-batch, each verified by itself. MBC135 unless they are of all of them, run
    the same collectives in the same order, and weight their rows alike."""
    shared = [plan.graph.ranks for plan in plans]
    first = shared[0]
    if first is None or any(ranks is None or ranks.rows != first.rows for ranks in shared):
        _fail("they share a mini-batch in different ways")
    members = sorted(rank for ranks in shared if ranks is not None for rank in ranks.members)
    if members != list(range(first.size)):
        _fail(f"they are of the ranks {members}, not of {first.size}, each once")
    for plan in plans[1:]:
        if tuple(_collectives(plan)) != tuple(_collectives(plans[0])):
            _fail(f"rank {_rank(plan)} sums other things than rank {_rank(plans[0])}, or in another order")
        for (name, weight), (_, other) in zip(_weights(plan), _weights(plans[0]), strict=True):
            if not math.isclose(weight * plans[0].graph.batch, other * plan.graph.batch, rel_tol=_ROUNDING):
                _fail(f"rank {_rank(plan)} weights the rows of '{name}' otherwise than rank {_rank(plans[0])}")


def shared_digest(plan: Plan) -> str:
    """The same on all ranks that can train together: of the whole plan where all run one, else of what they share."""
    ranks = plan.graph.ranks
    if ranks is not None and len(ranks.members) == ranks.size:
        told = dump_plan(replace(plan, settings=()))  # what was set, or is the source's, makes one plan
    else:
        states = [(state, plan.graph.values[state.value].type) for state in plan.graph.states]
        # Backward passes differ: plans of unlike GPUs store masks, or what they are made of.
        kinds = [(op.name, op.kind) for op in _forward(plan.graph)]
        common = (plan.version, plan.graph.precision, plan.graph.optimizer, states, kinds, [*_collectives(plan)])
        told = repr((None if ranks is None else ranks.rows, common))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _forward(graph: TrainingGraph) -> tuple[Operation, ...]:
    """Operations of the step that its loss and metrics follow from."""
    wanted = {graph.loss, *graph.metrics}
    found: list[Operation] = []
    for op in reversed(graph.train):
        if not wanted.isdisjoint(op.outputs):
            wanted.update(op.inputs)
            found.append(op)
    return tuple(reversed(found))


def _sums(graph: TrainingGraph) -> set[str]:
    """Values that are sums over all ranks: by an all-reduce, or of the rows of all ranks; and this rank's parts of such
    sums, the norms of the parts of all ranks, ratios of norms of sums, and squared norms of sums."""
    gathered = {output: op for op in graph.train if op.kind == GATHER_ROWS for output in op.outputs}
    norms = {output for op in graph.train if op.kind == "norm" for output in op.outputs}
    found: set[str] = set()
    for op in graph.train:
        read = [gathered.get(name) for name in op.inputs]
        if op.kind == GATHER_ROWS:
            if not all(graph.values[name].per_sample for name in op.inputs):
                _fail(f"'{op.name}' gathers what are no rows of a rank")
            if graph.ranks is not None and len(graph.ranks.members) < graph.ranks.size:
                _fail(f"'{op.name}' is for ranks that run one plan: others would add the same rows in another order")
        if any(read):
            first = read[0]
            if op.kind != OF_ROWS or first is None or read != [first, first] or op.inputs != first.outputs:
                _fail(f"'{op.name}' reads rows of all ranks, which is for the gradient of a weight alone")
        if (
            op.kind in (ALL_REDUCE, REDUCE_SCATTER)
            or any(read)
            or (op.kind == ALL_GATHER and norms.issuperset(op.inputs))
            or (op.kind in RATIOS and op.inputs[1] in found)
            or (op.kind in OF_SUMS and found.issuperset(op.inputs))
        ):
            found.update(op.outputs)
    return found


def _must_be_sums(graph: TrainingGraph, op: Operation) -> Iterator[str]:
    """Operands of the end of the step that must be the same on all ranks: the loss that `guard` looks at, gradients."""
    changed = {graph.values[op.inputs[old]].role for _, old in KINDS[op.kind].updates if old < len(op.inputs)}
    if not changed.isdisjoint(_SAME) and op.kind != GATHER_PARTS:
        yield from (name for name in op.inputs if graph.values[name].role in _OF_A_STEP and not _same(graph, name))


def _same(graph: TrainingGraph, name: str) -> bool:
    """Whether it is a version of a state that is the same on all ranks, since what changes it is."""
    return any(name == new and graph.values[old].role in _SAME for old, new in graph.updates)


def _check_once(graph: TrainingGraph, sums: Collection[str]) -> None:
    """No sum over ranks is part of another."""
    summed = set(sums)
    for op in graph.train:
        inside = not summed.isdisjoint(op.inputs)
        if inside and op.kind in (ALL_REDUCE, REDUCE_SCATTER, GATHER_ROWS):
            _fail(f"'{op.name}' sums over ranks what is summed over ranks already")
        if inside:
            summed.update(op.outputs)


def _check_shards(graph: TrainingGraph, ranks: Ranks) -> None:
    """Of a sharded optimizer: this rank's part of a sum serves the update of that part, and the norm that all ranks
    gather; what an update makes is gathered from all ranks, over the parameter that it is of. Which rows are whose part
    follows from the shapes (`mbc.ops.shard`), so that the parts of all ranks are all rows, each once."""
    made = {output: op for op in graph.train for output in op.outputs}
    readers: dict[str, list[Operation]] = {}
    for op in graph.train:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
        if op.kind in SHARDED and len(ranks.members) < ranks.size:
            _fail(
                f"'{op.name}' is for ranks that run one plan: others could have parts that lie in another order",
                "MBC136",
            )
    normed = [name for op in graph.train if op.kind == "norm" for name in op.inputs]
    for op in graph.train:
        if op.kind == REDUCE_SCATTER:
            part = op.outputs[0]
            kinds = [reader.kind for reader in readers.get(part, ())]
            updates = [kind for kind in kinds if kind in UPDATES_OF_PARTS]
            if len(updates) != 1 or kinds != ["norm"] * bool(normed) + updates:
                _fail(
                    f"'{op.name}' is this rank's part of a sum, which serves {' and '.join(kinds) or 'nothing'}",
                    "MBC136",
                )
        elif op.kind in UPDATES_OF_PARTS:
            gathers = readers.get(op.outputs[0], [])
            if [(g.kind, g.inputs) for g in gathers] != [(GATHER_PARTS, (op.outputs[0], op.inputs[0]))]:
                _fail(f"'{op.name}' updates a part of '{op.inputs[0]}', which the ranks do not gather once", "MBC136")
        elif op.kind == GATHER_PARTS:
            update = made.get(op.inputs[0])
            if update is None or update.kind not in UPDATES_OF_PARTS or update.inputs[0] != op.inputs[1]:
                _fail(f"'{op.name}' gathers what is no update of '{op.inputs[1]}'", "MBC136")
        elif op.kind == "norm":
            scattered = all(name in made and made[name].kind == REDUCE_SCATTER for name in op.inputs)
            if not scattered or [r.kind for r in readers.get(op.outputs[0], ())] != [ALL_GATHER]:
                _fail(f"'{op.name}' is no norm of parts of gradients that all ranks gather", "MBC136")


def _check_statistics(graph: TrainingGraph, ranks: Ranks) -> None:
    """Batch normalisation uses mean and variance of one origin: of this rank's rows, or synchronised, of all rows. Then
    they are what all ranks have gathered, weighted by rows, and the backward pass counts and sums over all rows."""
    outputs = _Outputs({output: (op, i) for op in graph.train for i, output in enumerate(op.outputs)})
    own: set[str] = set()  # statistics of this rank alone, which are combined with the others'
    for op in graph.train:
        match op.attributes:
            case CombineStatistics(counts):
                gathered = outputs.pair(op, *op.inputs)
                if gathered.kind != ALL_GATHER or outputs.pair(gathered, *gathered.inputs).kind not in STATISTICS:
                    _fail(f"'{op.name}' does not combine the statistics of all ranks")
                if len(counts) != ranks.size or any(
                    c * ranks.rows[0] != counts[0] * r for c, r in zip(counts, ranks.rows, strict=True)
                ):
                    _fail(f"'{op.name}' weights ranks otherwise than by their rows")
                own.update(gathered.inputs)
                continue
            case BatchNormalize():
                outputs.pair(op, *(op.inputs[1:3] if op.kind == "batch_normalize" else op.inputs[2:4]))
            case UpdateRunning(count=count):
                _check_count(op, outputs.pair(op, *op.inputs[2:4]), count)
            case BatchNormalizeBackward(count=count):
                statistics = outputs.pair(op, *op.inputs[2:4])
                _check_count(op, statistics, count)
                summed = outputs.pair(op, *op.inputs[4:6])
                if (summed.kind == "sum_gathered") is not isinstance(statistics.attributes, CombineStatistics):
                    _fail(f"'{op.name}' reads sums and statistics of different ranks")
            case _:
                continue
        if not own.isdisjoint(op.inputs):
            _fail(f"'{op.name}' reads statistics of one rank alone")


def _check_class_weights(graph: TrainingGraph, ranks: Ranks) -> None:
    """What is over weights or counts of classes is over those of all ranks, of which this one counts its share."""
    made = {output: op for op in graph.train for output in op.outputs}
    for op in graph.train:
        a, overlap = op.attributes, op.kind == OVERLAP_MEAN
        if not isinstance(a, WeightedMean | WeightedMeanBackward | TopKMean) and not overlap:
            continue
        found: list[str] = []
        value = op.inputs[0 if overlap else 2]
        while len(found) < 3 and value in made:
            found.append(made[value].kind)
            value = made[value].inputs[0]
        if found != ["sum_gathered", ALL_GATHER, "class_overlap" if overlap else "class_weight_sum"]:
            _fail(f"'{op.name}' is no mean over the weights of all ranks")
        if isinstance(a, WeightedMean | WeightedMeanBackward | TopKMean) and not math.isclose(
            a.share, ranks.share, rel_tol=_ROUNDING
        ):
            _fail(f"'{op.name}' counts {a.share} of the mini-batch, and this rank has {ranks.share}")


@dataclass(frozen=True)
class _Outputs:
    """By value: the operation that computes it, and as which output."""

    of: Mapping[str, tuple[Operation, int]]

    def pair(self, reader: Operation, *names: str) -> Operation:
        """The operation whose first and second output `reader` reads."""
        found = [self.of.get(name) for name in names]
        first = found[0]
        if first is None or found != [(first[0], 0), (first[0], 1)]:
            _fail(f"'{reader.name}' reads {' and '.join(names)}, which do not belong together")
        return first[0]


def _check_count(reader: Operation, statistics: Operation, count: int) -> None:
    """Of elements, by an operation that uses statistics of all ranks."""
    if isinstance(statistics.attributes, CombineStatistics) and count != sum(statistics.attributes.counts):
        _fail(f"'{reader.name}' counts {count} elements, and its statistics {sum(statistics.attributes.counts)}")


def _collectives(plan: Plan) -> Iterator[tuple[object, ...]]:
    """Of each collective in order: what it sums, with which settings, and how its operands lie: from the first one on,
    or in the arena where copies go from one rank's to another's."""
    copies = ctas_of(plan.train) == BY_COPIES
    for launch in filter(is_collective, plan.train.launches):
        start = 0 if copies else plan.offsets[launch.accesses[0].buffer]
        places = (_place(plan, access.buffer, start) for access in launch.accesses)
        # What is gathered lies anywhere.
        yield launch.operations, launch.work, tuple(place if is_bucket(launch) else place[:-1] for place in places)


def _place(plan: Plan, index: int, start: int) -> tuple[object, ...]:
    buffer = plan.buffers[index]
    return buffer.value, buffer.layout, buffer.dtype, buffer.size_bytes, plan.offsets[index] - start


def _weights(plan: Plan) -> Iterator[tuple[str, float]]:
    """What each loss counts."""
    for op in plan.graph.train:
        if isinstance(op.attributes, _LossGradient):
            yield op.name, op.attributes.weight


def _rank(plan: Plan) -> int:
    ranks = plan.graph.ranks
    return 0 if ranks is None else ranks.members[0]


def _fail(message: str, code: str = "MBC135") -> NoReturn:
    raise MbcError(code, f"plans of several GPUs: {message}", _REMEDY)
