"""What a training program does for a mini-batch whose gradients are only added up: all but the end of the step.

With `train { accumulate = k }` a step runs k mini-batches. The first k - 1 run what is described here, which is no more
than a part of the training program: its launches without those that need the sums (collectives over ranks, `guard`,
updates). So a plan says nothing of it, and the verifier proves that the part is a program of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mbc.errors import MbcError
from mbc.ir.graph import Operation, TrainingGraph
from mbc.plan.model import Launch, Plan, Program, Stream

ACCUMULATE = "accumulate"  # the program, and the kind of the operations that add up


@dataclass(frozen=True)
class Accumulation:
    """Of a graph: what runs for every mini-batch, and what for the last one alone."""

    graph: TrainingGraph

    @cached_property
    def late(self) -> frozenset[str]:
        """The operations that need the sums of all mini-batches."""
        summed = {output for op in self.graph.train if op.kind == ACCUMULATE for output in op.outputs}
        found: set[str] = set()
        for op in self.graph.train:
            if not summed.isdisjoint(op.inputs):
                found.add(op.name)
                summed.update(op.outputs)
        return frozenset(found)

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Those that run for every mini-batch."""
        return tuple(op for op in self.graph.train if op.name not in self.late)

    @cached_property
    def unknown(self) -> frozenset[str]:
        """Values that a mini-batch that is not the last leaves alone: what late operations make, and the states that
        they alone use."""
        made = {output for op in self.graph.train if op.name in self.late for output in op.outputs}
        used = {name for op in self.operations for name in (*op.inputs, *op.outputs)}
        alone = {v for op in self.graph.train if op.name in self.late for v in op.inputs if self._is_state(v)} - used
        return frozenset(made | alone)

    @property
    def updates(self) -> tuple[tuple[str, str], ...]:
        """States that every mini-batch changes, with what they become."""
        return tuple((old, new) for old, new in self.graph.updates if new not in self.unknown)

    def part(self) -> TrainingGraph:
        """The graph of such a mini-batch. It reports no metrics, and of the loss what the mini-batch adds."""
        return replace(self.graph, train=self.operations, updates=self.updates, metrics=())

    def _is_state(self, value: str) -> bool:
        return self.graph.values[value].role.persistent


def accumulating(plan: Plan) -> Program | None:
    """The program of a mini-batch that is not the last of its step; None where each is."""
    if plan.graph.optimizer.accumulate == 1:
        return None
    accumulation = Accumulation(plan.graph)
    kept = [not _is_late(plan, launch, accumulation) for launch in plan.train.launches]
    number = {old: new for new, old in enumerate(i for i, stays in enumerate(kept) if stays)}
    launches = tuple(launch for launch, stays in zip(plan.train.launches, kept, strict=True) if stays)
    waits = tuple((number[a], number[b]) for a, b in waits_of_part(plan.train, kept))
    return Program(launches, waits, plan.train.entry, _exit(plan, accumulation))


def _is_late(plan: Plan, launch: Launch, accumulation: Accumulation) -> bool:
    late = [name in accumulation.late for name in launch.operations]
    if any(late) and not all(late):
        raise MbcError(
            "MBC123",
            f"launch of {', '.join(launch.operations)}: a part of it is for each mini-batch, another one for the last",
            "this is a mistake of the compiler: report it with the plan file",
        )
    values = {plan.buffers[access.buffer].value for access in launch.accesses}
    return all(late) if late else not values.isdisjoint(accumulation.unknown)


def waits_of_part(program: Program, kept: Sequence[bool]) -> list[tuple[int, int]]:
    """Waits between launches that stay, so that each still starts behind all that it did: what a launch that is left
    out was behind is handed on to those that were behind it."""
    waited: dict[int, list[int]] = {}
    for earlier, later in program.waits:
        waited.setdefault(later, []).append(earlier)
    behind: list[frozenset[int]] = []  # of each launch: those that stay and that it, or what replaces it, comes after
    last: dict[Stream, frozenset[int]] = {}  # of each stream: what its next launch comes after
    found: list[tuple[int, int]] = []
    for i, launch in enumerate(program.launches):
        here = last.get(launch.stream, frozenset()).union(*(behind[w] for w in waited.get(i, ())))
        if kept[i]:
            found += [(w, i) for w in sorted(here) if program.launches[w].stream is not launch.stream]
            here = frozenset((i,))
        behind.append(here)
        last[launch.stream] = here
    return found


def _exit(plan: Plan, accumulation: Accumulation) -> tuple[int, ...]:
    """What is there at the end: in the place of what an update would have left a state as it was."""
    entry = {plan.buffers[index].value: index for index in plan.train.entry}
    before = {new: old for old, new in plan.graph.updates if new in accumulation.unknown}
    found: list[int] = []
    for index in plan.train.exit:
        value = plan.buffers[index].value
        if value in before:
            found.append(entry[before[value]])
        elif value not in accumulation.unknown:
            found.append(index)
    states = (entry[name] for name in accumulation.unknown if name in entry)
    return tuple(dict.fromkeys((*found, *sorted(states))))
