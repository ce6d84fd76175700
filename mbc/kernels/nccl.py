"""The provider `nccl`: collectives between the GPUs of several ranks.

There are three kinds of launches:

* a sum of a bucket: gradients that are adjacent in the arena, each beginning at a multiple of the buffers' alignment
* a gather of tensors from all ranks: statistics of batch normalization, operands of a weight's gradient
* for a sharded optimizer (`mbc.ops.shard`): a sum of gradients of which each rank keeps its part, or a gather of the
  parts of new parameters. The tensors may be anywhere in the arena; one group of NCCL calls is one kernel

`ctas` is the number of thread blocks. Each of them takes one multiprocessor from the kernels that run at the same time.
It is a property of the communicator, so that all launches of a plan have the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mbc.hardware.collective_times import CollectiveCost, CollectiveKind
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import ALIGNMENT_BYTES, aligned
from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.launch_struct import Struct
from mbc.ops.collective import WORD_BYTES, AllGather, AllReduce, in_words
from mbc.ops.fused import Fused, joined_kind
from mbc.ops.shard import ReduceScatter, part_of

NAME = "nccl"
ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"  # names of kernels and kinds of operations
GATHER_ROWS = "gather_rows"  # a kind that ALL_GATHER runs, too: stacking adds an axis but does not change the order
GATHERS = (ALL_GATHER, GATHER_ROWS)
REDUCE_SCATTER, GATHER_PARTS = "reduce_scatter", "gather_parts"
SHARDED = (REDUCE_SCATTER, GATHER_PARTS)
COLLECTIVES = (ALL_REDUCE, *GATHERS, *SHARDED)
CTAS = "ctas"
BY_COPIES = 0  # number of thread blocks: copy engines move the data, and a short kernel sums the parts
# Kinds of launches, with the numbers of templates/host/nccl.cpp.
_SUMS, _GATHERS, _SCATTERS, _GATHERS_PARTS = range(4)
Kind = TypeVar("Kind", bound=Attributes)


@dataclass(frozen=True, slots=True)
class CollectiveRow(Struct):
    """Integer arguments of a collective, which templates/host/nccl.cpp reads.

    A gather adds the words of 4 bytes of each operand, whatever its type. A launch of SHARDED adds, for each tensor,
    its elements and the elements of one part.

    Attributes:
        does: Kind of the launch.
        operands: Tensors that are gathered, summed or cut.
        elements: fp32 elements from the first to the last of a bucket that is summed, gaps between gradients included
            (by copies also the gap after the last); else 0.
        ctas: Thread blocks; 0: by copies.
    """

    does: int
    operands: int
    elements: int
    ctas: int


def _kinds(name: str) -> tuple[str, str]:
    """Return the kind of one operation and the kind of a bucket of such operations."""
    return name, joined_kind((name, name))


LEAST_BYTES = 4  # size of a collective whose time is latency alone


def divides_among(ranks: int) -> bool:
    """Return whether copies can sum every bucket among `ranks` ranks.

    Each rank sums an equal part, of whole elements, of a bucket whose bytes are a multiple of the alignment.
    """
    return ALIGNMENT_BYTES // DType.FP32.size_bytes % ranks == 0


def parts_bytes(members: Sequence[TensorType]) -> int:
    """Return the workspace of a sum by copies: the parts that a rank sums, together as long as the bucket."""
    return sum(aligned(member.size_bytes) for member in members)


def bucket_bytes(members: Sequence[TensorType]) -> int:
    """Return the bytes of a bucket from the first byte of its first gradient to the last byte of its last gradient."""
    return sum(aligned(member.size_bytes) for member in members[:-1]) + members[-1].size_bytes


def all_reduce_cost(device: DeviceSpec, size_bytes: int, ranks: int, ctas: int) -> CollectiveCost:
    """Return the cost of the sum of one bucket.

    If copies move the data, the cost includes the kernel that sums the parts: this kernel reads every part and writes
    one.
    """
    cost = device.collectives.cost(CollectiveKind.ALL_REDUCE, size_bytes, ranks, ctas)
    if ctas != BY_COPIES:
        return cost
    sum_us = device.launch_us + size_bytes * (1 + 1 / ranks) / (device.copy_gb_s * 1e3)
    return replace(cost, time_us=cost.time_us + sum_us)


def all_gather_cost(device: DeviceSpec, members: Sequence[TensorType], ranks: int, ctas: int) -> CollectiveCost:
    """Return the cost of one launch that gathers some tensors; every rank contributes equal sizes."""
    size_bytes = ranks * sum(member.size_bytes for member in members)
    return device.collectives.cost(CollectiveKind.ALL_GATHER, size_bytes, ranks, ctas)


def shard_cost(device: DeviceSpec, name: str, size_bytes: int, ranks: int, ctas: int) -> CollectiveCost:
    """Return the cost of a launch of one of SHARDED for whole tensors of `size_bytes` together."""
    kind = CollectiveKind.REDUCE_SCATTER if name == REDUCE_SCATTER else CollectiveKind.ALL_GATHER
    return device.collectives.cost(kind, size_bytes, ranks, ctas)


def latency_us(device: DeviceSpec, ranks: int) -> float:
    """Return the fixed time of a launch. Its candidates' times are the times that single gradients add to a bucket."""
    return all_reduce_cost(device, LEAST_BYTES, ranks, max(device.collectives.choices(ranks))).time_us


def attributes_of(attributes: Attributes, kind: type[Kind]) -> Kind | None:
    """Return the attributes of a collective of the type `kind`, or None.

    For a bucket, return the attributes that all its members have in common; None if any member differs.
    """
    members = [m.attributes for m in attributes.members] if isinstance(attributes, Fused) else [attributes]
    first = members[0]
    return first if isinstance(first, kind) and all(other == first for other in members) else None


def _wholes(request: Request) -> Sequence[TensorType]:
    """Return the whole tensors of one of SHARDED: the gradients, or the new parameters."""
    return request.inputs if request.kind in _kinds(REDUCE_SCATTER) else request.outputs


def _ranks_of_shards(request: Request) -> int | None:
    """Return the number of ranks of one of SHARDED, or None for other requests."""
    if request.kind in _kinds(REDUCE_SCATTER):
        scatter = attributes_of(request.attributes, ReduceScatter)
        return None if scatter is None else scatter.ranks
    if request.kind in _kinds(GATHER_PARTS):
        gather = attributes_of(request.attributes, AllGather)
        return None if gather is None else gather.ranks
    return None


@dataclass(frozen=True)
class Nccl:
    """The provider `nccl`."""

    name: str = NAME

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Yield a candidate for each layout of a sum, and one for a gather.

        A sum does not depend on the order of elements. The time of a sum is what it adds to a bucket; that of a gather
        is the time of the whole launch.
        """
        if request.kind in GATHERS and isinstance(request.attributes, AllGather) and in_words(request.inputs):
            yield self._gather(request, request.attributes.ranks, device)
        ranks = _ranks_of_shards(request)
        if ranks is not None and all(t.dtype is DType.FP32 for t in request.inputs):
            yield from self._shard(request, ranks, device)
        attributes = attributes_of(request.attributes, AllReduce)
        if attributes is None or any(t.dtype is not DType.FP32 for t in request.inputs):
            return
        ctas = max(device.collectives.choices(attributes.ranks))
        cost = all_reduce_cost(device, bucket_bytes(request.inputs), attributes.ranks, ctas)
        alone_us = latency_us(device, attributes.ranks)
        for layout in Layout:
            yield Candidate(
                provider=self.name,
                name=ALL_REDUCE,
                settings=((CTAS, ctas),),
                layouts=(layout,) * (len(request.inputs) + len(request.outputs)),
                workspace_bytes=0,
                time_us=max(0.0, cost.time_us - alone_us),
                measured=cost.measured,
            )

    def _gather(self, request: Request, ranks: int, device: DeviceSpec) -> Candidate:
        ctas = max(device.collectives.choices(ranks))
        cost = all_gather_cost(device, request.inputs, ranks, ctas)
        layouts = (Layout.CHANNELS_FIRST,) * (len(request.inputs) + len(request.outputs))
        return Candidate(self.name, ALL_GATHER, ((CTAS, ctas),), layouts, 0, cost.time_us, cost.measured)

    def _shard(self, request: Request, ranks: int, device: DeviceSpec) -> Iterable[Candidate]:
        name = REDUCE_SCATTER if request.kind in _kinds(REDUCE_SCATTER) else GATHER_PARTS
        ctas = max(device.collectives.choices(ranks))
        size_bytes = sum(whole.size_bytes for whole in _wholes(request))
        cost, least = (shard_cost(device, name, size, ranks, ctas) for size in (size_bytes, LEAST_BYTES))
        operands = len(request.inputs) + len(request.outputs)
        for layout in Layout:
            us = max(0.0, cost.time_us - least.time_us)
            yield Candidate(self.name, name, ((CTAS, ctas),), (layout,) * operands, 0, us, cost.measured)

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return the integers of a `CollectiveRow`, and of its tensors."""
        request, ctas = call.request, dict(call.settings)[CTAS]
        ranks = _ranks_of_shards(request)
        if ranks is not None:
            wholes = _wholes(request)
            sizes = [n for whole in wholes for n in (whole.elements, part_of(whole, ranks).elements)]
            does = _SCATTERS if call.name == REDUCE_SCATTER else _GATHERS_PARTS
            return Arguments((*CollectiveRow(does, len(wholes), 0, ctas).integers(), *sizes))
        if isinstance(request.attributes, AllGather):
            words = [operand.size_bytes // WORD_BYTES for operand in request.inputs]
            return Arguments((*CollectiveRow(_GATHERS, len(words), 0, ctas).integers(), *words))
        size_bytes = parts_bytes(request.inputs) if ctas == BY_COPIES else bucket_bytes(request.inputs)
        elements = size_bytes // DType.FP32.size_bytes
        return Arguments(CollectiveRow(_SUMS, len(request.inputs), elements, ctas).integers())

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Return whether NCCL, or copies between GPUs, can run the call."""
        request = call.request
        gathers = request.kind in GATHERS and isinstance(request.attributes, AllGather) and call.name == ALL_GATHER
        all_reduce = attributes_of(request.attributes, AllReduce)
        sums = request.kind in _kinds(ALL_REDUCE) and all_reduce is not None and call.name == ALL_REDUCE
        shards = _ranks_of_shards(request) is not None and request.kind in _kinds(call.name)
        if not (gathers or sums or shards):
            return Acceptance(f"NCCL cannot run {request.kind} with these operands as '{call.name}'")
        if call.accumulate:
            return Acceptance("it cannot add to its output")
        if (sums or shards) and any(t.dtype is not DType.FP32 for t in call.operands):
            return Acceptance("a sum over ranks and the parts of a shard must be in fp32")
        if gathers and not in_words(request.inputs):
            return Acceptance(f"the size of a gathered tensor must be a multiple of {WORD_BYTES} bytes")
        if [key for key, _ in call.settings] != [CTAS] or call.settings[0][1] < BY_COPIES:
            return Acceptance(f"its only setting is the number of thread blocks, {CTAS}, not {dict(call.settings)}")
        if gathers:
            refused = call.settings[0][1] == BY_COPIES or Layout.CHANNELS_LAST in call.layouts
            return Acceptance("a gather needs thread blocks and operands that are channels first" if refused else "")
        if shards:
            if call.settings[0][1] == BY_COPIES:
                return Acceptance("copy engines cannot cut tensors into parts: it needs thread blocks")
            alike = _members_have_one_layout(call)
            return Acceptance("" if alike else "a shard must have the layout of the whole tensor")
        inputs = len(request.inputs)
        if request.inputs != request.outputs or call.layouts[:inputs] != call.layouts[inputs:]:
            layouts = ", ".join(call.layouts)
            return Acceptance(
                f"it does not take operands in the layouts {layouts}: an all-reduce keeps the layout of its input"
            )
        if call.settings[0][1] == BY_COPIES:
            if all_reduce is None or not divides_among(all_reduce.ranks):
                return Acceptance("copies cannot divide a bucket evenly among this number of ranks")
            needed_bytes = parts_bytes(request.inputs)
            if call.workspace_bytes < needed_bytes:
                return Acceptance(workspace_refusal=f"the parts of all ranks take {needed_bytes} bytes")
        return Acceptance()


def _members_have_one_layout(call: Call) -> bool:
    """Return whether the operands of each member of a bucket have one layout.

    Inputs come member by member, and so do outputs.
    """
    inputs, outputs = len(call.request.inputs), len(call.request.outputs)
    each = inputs // outputs
    for member in range(outputs):
        places = [*range(each * member, each * (member + 1)), inputs + member]
        if len({call.layouts[at] for at in places if call.operands[at].ordered}) > 1:
            return False
    return each * outputs == inputs


NCCL = Nccl()
