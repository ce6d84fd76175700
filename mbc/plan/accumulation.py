"""The part of a training program that runs for a mini-batch whose gradients are only accumulated.

With `train { accumulate = k }` a step runs k mini-batches. The first k - 1 run the part described here: all launches of
the training program except those that need the sums (collectives over ranks, `guard`, updates). The plan does not
store this part, because it follows from the training program. The verifier proves that the part is a valid program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mbc.errors import MbcError
from mbc.hardware.streams import Stream
from mbc.ir.graph import Operation, TrainingGraph
from mbc.plan.model import Launch, Plan, Program

ACCUMULATE = "accumulate"  # name of the program, and kind of the operations that accumulate


@dataclass(frozen=True)
class Accumulation:
    """The operations of a graph, divided into those of every mini-batch and those of the last mini-batch of a step."""

    graph: TrainingGraph

    @cached_property
    def late(self) -> frozenset[str]:
        """Names of the operations that need the sums of all mini-batches."""
        summed = {output for op in self.graph.train if op.kind == ACCUMULATE for output in op.outputs}
        late: set[str] = set()
        for op in self.graph.train:
            if not summed.isdisjoint(op.inputs):
                late.add(op.name)
                summed.update(op.outputs)
        return frozenset(late)

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Operations that run for every mini-batch."""
        return tuple(op for op in self.graph.train if op.name not in self.late)

    @cached_property
    def unknown(self) -> frozenset[str]:
        """Values that a mini-batch before the last one neither reads nor writes.

        They are the results of late operations, and the states that only late operations use.
        """
        results = {output for op in self.graph.train if op.name in self.late for output in op.outputs}
        used = {name for op in self.operations for name in (*op.inputs, *op.outputs)}
        alone = {v for op in self.graph.train if op.name in self.late for v in op.inputs if self._is_state(v)} - used
        return frozenset(results | alone)

    @property
    def updates(self) -> tuple[tuple[str, str], ...]:
        """Pairs (state, next version) of the states that every mini-batch changes."""
        return tuple((old, new) for old, new in self.graph.updates if new not in self.unknown)

    def part(self) -> TrainingGraph:
        """Return the graph of a mini-batch before the last one: without metrics, its loss is the mini-batch's share."""
        return replace(self.graph, train=self.operations, updates=self.updates, metrics=())

    def _is_state(self, value: str) -> bool:
        return self.graph.values[value].role.persistent


def accumulating(plan: Plan, first: int = 0) -> Program | None:
    """Return the program of a mini-batch that is not the last of its step; None if a step has one mini-batch.

    Args:
        plan: The plan.
        first: The number of launches at the beginning of the program that every mini-batch runs, whether or not it
            needs them.
    """
    if plan.graph.optimizer.accumulate == 1:
        return None
    accumulation = Accumulation(plan.graph)
    launches = enumerate(plan.train.launches)
    kept = [i < first or not _is_late(plan, launch, accumulation) for i, launch in launches]
    number = {old: new for new, old in enumerate(i for i, stays in enumerate(kept) if stays)}
    launches = tuple(launch for launch, stays in zip(plan.train.launches, kept, strict=True) if stays)
    waits = tuple((number[a], number[b]) for a, b in waits_of_part(plan.train, kept))
    return Program(launches, waits, plan.train.entry, _exit(plan, accumulation))


def _is_late(plan: Plan, launch: Launch, accumulation: Accumulation) -> bool:
    late = [name in accumulation.late for name in launch.operations]
    if any(late) and not all(late):
        raise MbcError(
            "MBC123",
            f"launch of {', '.join(launch.operations)}: some of its operations run for each mini-batch, "
            "others for the last one only",
            "this is a mistake of the compiler: report it with the plan file",
        )
    values = {plan.buffers[access.buffer].value for access in launch.accesses}
    return all(late) if late else not values.isdisjoint(accumulation.unknown)


def waits_of_part(program: Program, kept: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the waits of the kept launches that preserve their order in the whole program.

    A kept launch that came after a dropped launch waits for the kept launches that the dropped launch came after.

    Args:
        program: The whole program.
        kept: For each launch of `program`, whether the part contains it.
    """
    waited: dict[int, list[int]] = {}
    for earlier, later in program.waits:
        waited.setdefault(later, []).append(earlier)
    behind: list[frozenset[int]] = []  # by launch: itself if it is kept, else the kept launches that it comes after
    last: dict[Stream, frozenset[int]] = {}  # by stream: the kept launches that its next launch comes after
    waits: list[tuple[int, int]] = []
    for i, launch in enumerate(program.launches):
        here = last.get(launch.stream, frozenset()).union(*(behind[w] for w in waited.get(i, ())))
        if kept[i]:
            waits += [(w, i) for w in sorted(here) if program.launches[w].stream is not launch.stream]
            here = frozenset((i,))
        behind.append(here)
        last[launch.stream] = here
    return waits


def _exit(plan: Plan, accumulation: Accumulation) -> tuple[int, ...]:
    """Return the exit buffers: where an update would have written a state, the buffer of the unchanged state."""
    entry = {plan.buffers[index].value: index for index in plan.train.entry}
    before = {new: old for old, new in plan.graph.updates if new in accumulation.unknown}
    buffers: list[int] = []
    for index in plan.train.exit:
        value = plan.buffers[index].value
        if value in before:
            buffers.append(entry[before[value]])
        elif value not in accumulation.unknown:
            buffers.append(index)
    states = (entry[name] for name in accumulation.unknown if name in entry)
    return tuple(dict.fromkeys((*buffers, *sorted(states))))
