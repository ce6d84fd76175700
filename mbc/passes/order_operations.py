"""An order of the operations of a step with fewer live bytes, where branches allow one.

The source's order runs one branch after the other, and the backward pass runs in its reverse. Another order may free a
large value before the next one exists: the gradient of a large linear layer can wait until activations are freed. The
search orders the operations near the peak anew, by dynamic programming over the sets of operations that may have run
(Ahn et al., "Ordering chaos: memory-aware scheduling of irregularly wired neural networks for edge devices", 2020).
What is live before and behind such a window does not depend on the order inside it, so no other operation gets more
live bytes.

No number changes: a sum keeps the order of its terms, and a dropout draws its numbers by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from mbc.ir.graph import Operation, Value
from mbc.ops import KINDS

LEAST_GAIN = 0.05  # share of the live bytes, states included: less does not justify another order
REACHES = (4, 8, 16)  # units before and behind the peak that are ordered anew
MOST_SETS = 64  # sets of one size that are followed: those with the lowest peaks
MOST_ROUNDS = 40  # windows whose order changes

_Path = tuple[int, int, tuple[int, ...]]  # peak, live bytes behind the last unit, and units in order


def order_operations(operations: Sequence[Operation], values: Mapping[str, Value]) -> list[Operation]:
    """Return the operations in an order with fewer live bytes at the peak; in the same order if it gains little.

    The guard, and what follows it, keeps its place. An operation and those that follow it directly and read its
    results, up to the next matrix product, stay together, because one launch may run them.

    Args:
        operations: The training program, in order.
        values: All values by name.
    """
    end = next((i for i, op in enumerate(operations) if KINDS[op.kind].updates), 0)
    step = _Step.of(operations[:end], operations[end:], values)
    order = source = tuple(range(len(step.units)))
    for _ in range(MOST_ROUNDS):
        better = next(step.improvements(order), None)
        if better is None:
            break
        order = better
    states_bytes = sum(value.type.size_bytes for value in values.values() if value.role.persistent)
    before, after = (max(step.peaks(trial), default=0) + states_bytes for trial in (source, order))
    if after > (1 - LEAST_GAIN) * before:
        return [*operations]
    return [*(op for unit in order for op in step.units[unit].operations), *operations[end:]]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Operations that stay together.

    Attributes:
        operations: The operations, in order.
        needs: Units whose results they read.
        writes: For each operation, the values that it computes and that occupy memory. A view occupies none.
        ends: For each operation, the values that it touches and that no later operation of the unit touches.
        in_place: For each operation, pairs of a result and of the operand whose bytes it may take.
    """

    operations: tuple[Operation, ...]
    needs: frozenset[int]
    writes: tuple[tuple[str, ...], ...]
    ends: tuple[tuple[str, ...], ...]
    in_place: tuple[tuple[tuple[str, str], ...], ...]

    @property
    def touched(self) -> Iterator[str]:
        """The values that the unit computes or reads."""
        return (name for names in self.ends for name in names)


@dataclass(frozen=True)
class _Step:
    """The units of a step, and the bytes of its values.

    Attributes:
        units: The units, in the order of the source.
        bytes_of: Bytes of each value; 0 for states, which are live all the time.
        users: Units that compute or read each value.
        lasting: Values that are live until the end of the step.
        inputs_bytes: Bytes of the values that no unit computes.
    """

    units: tuple[_Unit, ...]
    bytes_of: Mapping[str, int]
    users: Mapping[str, frozenset[int]]
    lasting: frozenset[str]
    inputs_bytes: int

    @staticmethod
    def of(operations: Sequence[Operation], behind: Sequence[Operation], values: Mapping[str, Value]) -> _Step:
        """Return the units of `operations`; the operations `behind` them run at the end.

        The gradient of a parameter is free as soon as its update has run, which may be at once.
        """
        viewed: dict[str, str] = {}
        groups: list[list[Operation]] = []
        for op in operations:
            if KINDS[op.kind].view:
                viewed[op.outputs[0]] = viewed.get(op.inputs[0], op.inputs[0])
            follows = bool(groups) and not set(op.inputs).isdisjoint(groups[-1][-1].outputs)
            if follows and KINDS[op.kind].flops is None:
                groups[-1].append(op)
            else:
                groups.append([op])

        def owners(names: Iterable[str]) -> dict[str, None]:
            return dict.fromkeys(viewed.get(name, name) for name in names)

        units: list[_Unit] = []
        users: dict[str, set[int]] = {}
        makers = {name: number for number, group in enumerate(groups) for op in group for name in op.outputs}
        for number, group in enumerate(groups):
            touched = [owners((*op.inputs, *op.outputs)) for op in group]
            last = {name: at for at, names in enumerate(touched) for name in names}
            for name in last:
                users.setdefault(name, set()).add(number)
            pairs = [[(o, i) for o, i in KINDS[op.kind].in_place if i < len(op.inputs)] for op in group]
            units.append(
                _Unit(
                    tuple(group),
                    frozenset(makers[v] for op in group for v in op.inputs if v in makers) - {number},
                    tuple(() if KINDS[op.kind].view else op.outputs for op in group),
                    tuple(tuple(n for n in names if last[n] == at) for at, names in enumerate(touched)),
                    tuple(
                        tuple((op.outputs[o], viewed.get(op.inputs[i], op.inputs[i])) for o, i in some)
                        for op, some in zip(group, pairs, strict=True)
                    ),
                )
            )
        read = owners(name for op in operations for name in op.inputs)
        updating = owners(name for op in behind if KINDS[op.kind].updates for name in op.inputs)
        later = owners(name for op in behind if not KINDS[op.kind].updates for name in op.inputs)
        sizes = {name: 0 if values[name].role.persistent else values[name].type.size_bytes for name in users}
        return _Step(
            tuple(units),
            sizes,
            {name: frozenset(numbers) for name, numbers in users.items()},
            frozenset(name for name in users if name in later or not (name in read or name in updating)),
            sum(size for name, size in sizes.items() if name not in makers),
        )

    def run(self, unit: int, left: Mapping[str, int]) -> tuple[int, int]:
        """Return the peak of the live bytes while a unit runs, and the bytes behind it, relative to those before it.

        Args:
            unit: The unit.
            left: Number of users of each value that have not run.
        """
        here, live, peak = self.units[unit], 0, 0
        for writes, ends, pairs in zip(here.writes, here.ends, here.in_place, strict=True):
            freed = {name for name in ends if left[name] == 1 and name not in self.lasting}
            size = self.bytes_of
            taken = sum(size[source] for target, source in pairs if source in freed and size[source] == size[target])
            live += sum(size[name] for name in writes)
            peak = max(peak, live - taken)
            live -= sum(size[name] for name in freed)
        return peak, live

    def walk(self, order: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield for each unit the peak of the live bytes while it runs, and the live bytes behind it."""
        left = {name: len(units) for name, units in self.users.items()}
        live = self.inputs_bytes
        for unit in order:
            peak, change = self.run(unit, left)
            yield live + peak, live + change
            live += change
            for name in self.units[unit].touched:
                left[name] -= 1

    def peaks(self, order: Sequence[int]) -> list[int]:
        """Return the peak of the live bytes of each unit."""
        return [peak for peak, _ in self.walk(order)]

    def improvements(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield orders in which no unit near the one with the highest peak reaches this peak."""
        peaks = self.peaks(order)
        highest = max(peaks, default=0)
        for reach in REACHES if peaks else ():
            at = peaks.index(highest)
            start, stop = max(0, at - reach), min(len(order), at + reach + 1)
            window = self._below(highest, order[:start], order[start:stop])
            if window is not None:
                yield (*order[:start], *window, *order[stop:])

    def _below(self, bound: int, before: Sequence[int], window: Sequence[int]) -> tuple[int, ...] | None:
        """Return the order of a window with the lowest peak, if that is below a bound; otherwise None."""
        inside, done_before = frozenset(window), frozenset(before)
        names = dict.fromkeys(name for unit in window for name in self.units[unit].touched)
        users = {name: self.users[name] - done_before for name in names}
        live = [self.inputs_bytes, *(live for _, live in self.walk(before))][-1]
        sets: dict[frozenset[int], _Path] = {frozenset(): (0, live, ())}
        for _ in window:
            larger: dict[frozenset[int], _Path] = {}
            for done, (peak, live, path) in sets.items():
                left = {name: len(units - done) for name, units in users.items()}
                for unit in window:
                    if unit in done or not (self.units[unit].needs & inside) <= done:
                        continue
                    here, change = self.run(unit, left)
                    reached, key = max(peak, live + here), done | {unit}
                    if reached < bound and (key not in larger or reached < larger[key][0]):
                        larger[key] = reached, live + change, (*path, unit)
            sets = dict(nsmallest(MOST_SETS, larger.items(), key=_peak_and_live))
        return next((path for _, _, path in sets.values()), None)


def _peak_and_live(item: tuple[frozenset[int], _Path]) -> tuple[int, int]:
    return item[1][:2]
