"""Runs a plan with NumPy, in one byte array of exactly the arena's size: the reference for the meaning of a plan.

It follows every offset, slice, alias, accumulation, conversion and copy of the plan. Nothing is stored outside the
arena and the host space, except the result of the launch that is running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.streams import ALIGNMENT_BYTES, Space
from mbc.ir.graph import Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.base import NO_OTHER_RANKS, Call, Collectives
from mbc.ops.fused import kind_of
from mbc.plan.cut import parts_of
from mbc.plan.group import operation_of, title
from mbc.plan.model import Access, Copy, Kernel, Launch, Mode, Plan
from mbc.runtime.bindings import Place, persistent_buffers, view_roots
from mbc.runtime.formats import canonical_view, load, store
from mbc.runtime.launch_order import Transfers, execution_order
from mbc.runtime.shadow import Region, Shadow, access_region, describe

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Operand:
    """One access as an array.

    Attributes:
        view: The bytes in canonical order.
        dtype: Type in which the elements are stored.
        type: Type of the accessed rows.
        first_row: First accessed row.
        per_sample: Whether the first axis counts the rows of the mini-batch.
        accumulate: Whether a result is added to the bytes that are there.
    """

    view: Array
    dtype: DType
    type: TensorType  # of these rows
    first_row: int
    per_sample: bool
    accumulate: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A launch that is ready to run, with the bytes that it reads and writes."""

    where: str
    run: Callable[[], None]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


class Interpreter:
    """Executes the programs of a plan."""

    def __init__(
        self,
        plan: Plan,
        *,
        shadow: bool = True,
        transfers: Transfers = Transfers.IN_ORDER,
        collectives: Collectives = NO_OTHER_RANKS,
        arena: NDArray[np.uint8] | None = None,
    ) -> None:
        """Allocate the spaces of `plan`.

        Running a plan that makes no sense raises MBC141 to MBC145.

        Args:
            plan: The plan to execute.
            shadow: Whether the owner of every byte is checked the first time that each program runs
                (`mbc/runtime/shadow.py`).
            transfers: When the launches of streams other than the compute stream run.
            collectives: Collectives of the ranks that share a mini-batch.
            arena: Memory for the arena, of at least its size; None allocates it.
        """
        self._plan = plan
        self._collectives = collectives
        owned = [space for space in Space if space is not Space.ARENA or arena is None]
        self._spaces = {space: _aligned(plan.predictions.bytes_of(space)) for space in owned}
        if arena is not None:
            self._spaces[Space.ARENA] = arena[: plan.predictions.arena_bytes]
        self._operations = {operation.name: operation for operation in (*plan.graph.train, *plan.graph.infer)}
        self._roots = view_roots(self._operations.values())
        self._programs = {"train": plan.train, "infer": plan.infer, **parts_of(plan)}
        self._steps: dict[str, tuple[Step, ...]] = {}
        self._unwatched = set(self._programs) if shadow else set[str]()
        self._transfers = transfers

    @property
    def arena(self) -> NDArray[np.uint8]:
        """The arena's bytes: exactly `predictions.arena_bytes`."""
        return self._spaces[Space.ARENA]

    def space(self, space: Space) -> NDArray[np.uint8]:
        """Return all bytes of the arena, or of the array for host or peer memory: exactly as many as predicted."""
        return self._spaces[space]

    def write(self, place: Place, array: Array) -> None:
        """Store a canonical array of the place's shape."""
        store(self._view(place), place.dtype, array)

    def read(self, place: Place) -> Array:
        """Return a copy of the array at a place, in canonical layout."""
        return np.array(load(self._view(place), place.dtype), order="C", copy=True)

    def shared(self, place: Place) -> Array:
        """Return an array of canonical shape over the memory of a place."""
        return self._view(place)

    def twin(self) -> Interpreter:
        """Return another interpreter with equal bytes.

        The copy prepares its own steps, because this interpreter's steps work on this interpreter's memory.
        """
        other = Interpreter(self._plan, transfers=self._transfers, collectives=self._collectives)
        other._unwatched = set(self._unwatched)
        for space, data in self._spaces.items():
            other._spaces[space][:] = data
        return other

    def run(self, name: str) -> None:
        """Execute the program `train` or `infer`, or a part of `train`."""
        steps = self._prepared(name)
        # Overflow and NaN are results here, as on a GPU: the step's guard checks them.
        with np.errstate(all="ignore"):
            if name in self._unwatched:
                self._run_watched(name, steps)
                self._unwatched.discard(name)
            else:
                for step in steps:
                    step.run()

    def run_launch(self, name: str, index: int) -> None:
        """Execute one launch of a program without the shadow; all launches that it depends on must have run."""
        at = execution_order(self._programs[name], self._transfers).index(index)
        with np.errstate(all="ignore"):
            self._prepared(name)[at].run()

    def _run_watched(self, name: str, steps: tuple[Step, ...]) -> None:
        program = self._programs[name]
        shadow = Shadow(self._plan)
        # Only whole programs tell which buffers are states: a part of a program may begin with copies of states in
        # another layout, too.
        whole = (self._plan.train, self._plan.infer)
        states = [index for other in whole for index in persistent_buffers(self._plan, other)]
        shadow.begin(program.entry, states)
        for step in steps:
            for region in step.reads:
                shadow.read(region, step.where)
            step.run()
            for region in step.writes:
                shadow.write(region)
        shadow.end(program, name)

    def _prepared(self, name: str) -> tuple[Step, ...]:
        """Return the steps of a program, which are built the first time that it runs."""
        if name not in self._steps:
            program = self._programs[name]
            order = execution_order(program, self._transfers)
            self._steps[name] = tuple(self._step(name, index, program.launches[index]) for index in order)
        return self._steps[name]

    def _step(self, program: str, index: int, launch: Launch) -> Step:
        work = launch.work
        what = "copy" if isinstance(work, Copy) else f"{work.provider}.{work.name}"
        where = f"launch {index} of {program} ({title(launch.operations) or what})"
        regions = tuple(access_region(self._plan, access) for access in launch.accesses)
        pairs = tuple(zip(launch.accesses, regions, strict=True))
        if isinstance(work, Copy):
            run, allowed = self._copy(where, launch, regions), frozenset[tuple[int, int]]()
        elif not launch.operations and work.name == "convert":
            run, allowed = self._convert(where, launch, regions), frozenset[tuple[int, int]]()
        else:
            run, allowed = self._kernel(where, launch, work, regions)
        self._check_overlaps(where, launch, regions, allowed)
        return Step(
            where,
            run,
            tuple(region for access, region in pairs if access.mode is not Mode.WRITE),
            tuple(region for access, region in pairs if access.mode is not Mode.READ),
        )

    def _kernel(
        self, where: str, launch: Launch, work: Kernel, regions: tuple[Region, ...]
    ) -> tuple[Callable[[], None], frozenset[tuple[int, int]]]:
        if not launch.operations or any(name not in self._operations for name in launch.operations):
            _refuse(where, f"{work.provider}.{work.name} must run operations of the graph")
        operation = operation_of(launch, self._operations, self._plan.buffers)
        kind = kind_of(operation)
        evaluate = kind.evaluate
        if evaluate is None:
            _refuse(where, f"operations of kind '{kind.name}' are not executed")
        operands = self._operands(where, operation, launch, regions)
        count = len(operation.inputs)
        inputs, outputs = operands[:count], operands[count:]
        call = Call(
            outputs=tuple(operand.type for operand in outputs),
            first_row=next((operand.first_row for operand in operands if operand.per_sample), 0),
            batch=self._plan.graph.batch,
            precision=self._plan.graph.precision,
            collectives=self._collectives,
        )
        attributes = operation.attributes
        arena = self._spaces[Space.ARENA]

        def run() -> None:
            results = evaluate(attributes, [load(operand.view, operand.dtype) for operand in inputs], call)
            if len(results) > 1:
                # A result may be a view of an input; storing another result first could change it.
                results = tuple(np.array(r) if np.may_share_memory(r, arena) else r for r in results)
            for operand, result in zip(outputs, results, strict=True):
                if result.shape != operand.view.shape:
                    _refuse(where, f"the result is {result.shape}, its buffer {operand.view.shape}")
                if operand.accumulate:
                    store(operand.view, operand.dtype, load(operand.view, operand.dtype) + result)
                else:
                    store(operand.view, operand.dtype, result)

        # Positions of accesses that may share bytes: (output, input).
        allowed = frozenset((count + out, source) for out, source in (*kind.in_place, *kind.updates))
        return run, allowed

    def _operands(
        self, where: str, operation: Operation, launch: Launch, regions: tuple[Region, ...]
    ) -> tuple[Operand, ...]:
        """Return an operation's inputs and outputs as arrays over the bytes of its accesses."""
        values = self._plan.graph.values
        names = (*operation.inputs, *operation.outputs)
        if not len(names) <= len(launch.accesses) <= len(names) + 1:
            _refuse(where, f"{len(launch.accesses)} accesses for {len(names)} operands")
        operands: list[Operand] = []
        for position, (name, access, region) in enumerate(zip(names, launch.accesses, regions, strict=False)):
            root = self._roots.get(name, name)
            buffer = self._plan.buffers[access.buffer]
            if buffer.value == name:
                root = name  # a view that was converted has a buffer of its own
            if buffer.value != root:
                _refuse(where, f"operand '{name}' is in buffer {describe(self._plan, access.buffer)}")
            if (position >= len(operation.inputs)) == (access.mode is Mode.READ):
                _refuse(where, f"operand '{name}' is accessed by '{access.mode}'")
            value = values[name]
            rooted = values[root].type
            kind = value.type.with_rows(access.rows.count) if value.per_sample else value.type
            stored = rooted.with_rows(access.rows.count) if value.per_sample else rooted
            view = self._bytes(where, region, stored.elements * buffer.dtype.size_bytes)
            view = canonical_view(view, stored.shape, buffer.dtype, buffer.layout)
            if kind.shape != stored.shape:
                shaped = view.reshape(kind.shape)
                if not np.shares_memory(shaped, view):
                    _refuse(where, f"'{name}' is a view of '{root}', whose buffer is not channels-first")
                view = shaped
            if access.mode is Mode.READ:
                view.flags.writeable = False
            accumulate = access.mode is Mode.ACCUMULATE
            operands.append(Operand(view, buffer.dtype, kind, access.rows.start, value.per_sample, accumulate))
        slices = {operand.first_row for operand in operands if operand.per_sample}
        slices_end = {o.first_row + o.type.shape[0] for o in operands if o.per_sample}
        if len(slices) > 1 or len(slices_end) > 1:
            _refuse(where, "its operands have different rows")
        return tuple(operands)

    def _convert(self, where: str, launch: Launch, regions: tuple[Region, ...]) -> Callable[[], None]:
        source, target = self._source_and_target(where, launch)
        first, second = self._plan.buffers[source.buffer], self._plan.buffers[target.buffer]
        name = second.value
        if name is None or first.value not in (name, self._roots.get(name)) or source.rows != target.rows:
            _refuse(where, "a conversion reads and writes the same rows of one value")
        value = self._plan.graph.values[name]
        shape = value.type.with_rows(source.rows.count).shape if value.per_sample else value.type.shape
        views = [
            canonical_view(self._bytes(where, region, None), shape, buffer.dtype, buffer.layout)
            for region, buffer in zip(regions, (first, second), strict=True)
        ]

        def run() -> None:
            store(views[1], second.dtype, load(views[0], first.dtype))

        return run

    def _copy(self, where: str, launch: Launch, regions: tuple[Region, ...]) -> Callable[[], None]:
        source, target = self._source_and_target(where, launch)
        first, second = self._plan.buffers[source.buffer], self._plan.buffers[target.buffer]
        if (first.value, first.layout, first.dtype, source.rows) != (
            second.value,
            second.layout,
            second.dtype,
            target.rows,
        ):
            _refuse(where, "a copy moves the same rows of one value, in one layout and type")
        read, written = (self._bytes(where, region, None) for region in regions)

        def run() -> None:
            written[...] = read

        return run

    def _source_and_target(self, where: str, launch: Launch) -> tuple[Access, Access]:
        if [access.mode for access in launch.accesses] != [Mode.READ, Mode.WRITE]:
            _refuse(where, "it must read one buffer and write one")
        return launch.accesses[0], launch.accesses[1]

    def _check_overlaps(
        self, where: str, launch: Launch, regions: tuple[Region, ...], allowed: frozenset[tuple[int, int]]
    ) -> None:
        """Raise an error if a launch overwrites an operand, unless both the operation and the plan allow it.

        Raises:
            MbcError: MBC144 for an overlap of a written buffer with another operand.
        """
        accesses, buffers = launch.accesses, self._plan.buffers
        for i, written in enumerate(regions):
            if accesses[i].mode is Mode.READ:
                continue
            for j, other in enumerate(regions):
                if i == j or written.space is not other.space:
                    continue
                if max(written.start, other.start) >= min(written.stop, other.stop):
                    continue
                aliased = buffers[written.buffer].alias == other.buffer and written.start == other.start
                if not (aliased and (i, j) in allowed):
                    raise MbcError(
                        "MBC144",
                        f"{where} writes buffer {describe(self._plan, written.buffer)} over its own operand,"
                        f" buffer {describe(self._plan, other.buffer)}",
                        "this is a mistake of the compiler: report it with the plan file",
                    )

    def _bytes(self, where: str, region: Region, size_bytes: int | None) -> NDArray[np.uint8]:
        data = self._spaces[region.space][region.start : region.stop]
        if data.size != region.stop - region.start or (size_bytes is not None and data.size != size_bytes):
            wanted = region.stop - region.start if size_bytes is None else size_bytes
            _refuse(
                where,
                f"buffer {describe(self._plan, region.buffer)} has {data.size} bytes at {region.start}, not {wanted}",
            )
        return data

    def _view(self, place: Place) -> Array:
        data = self._spaces[place.space][place.offset_bytes : place.offset_bytes + place.size_bytes]
        return canonical_view(data, place.shape, place.dtype, place.layout)


def _aligned(size_bytes: int) -> NDArray[np.uint8]:
    """Return `size_bytes` of memory with a GPU buffer's alignment, so that views are aligned as on a GPU."""
    raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    raw.fill(0xFF)  # NaN in every floating type: bytes that were never written are noticed even without a shadow
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


def _refuse(where: str, why: str) -> NoReturn:
    raise MbcError("MBC145", f"{where}: {why}", "this is a mistake of the compiler: report it with the plan file")
