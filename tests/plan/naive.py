"""The results of a plan, computed in a slow and simple way: one token for four bytes, several schedules.

A token stands for a value, a row and a part of the row. Kernels hash the tokens that they read, so any wrong, stale or
missing byte that matters changes the final tokens. This file shares no code with the verifier.
"""

from __future__ import annotations

import itertools
import random

from mbc.hardware.streams import Stream
from mbc.ir.graph import Operation
from mbc.ops import KINDS
from mbc.plan.model import Launch, Mode, Plan, Program, Rows
from tests.plan.chains import byte_range

GRAIN_BYTES = 4
_MODULUS = (1 << 61) - 1


def schedules(program: Program, seed: int, count: int):
    """Yield orders in which the launches may run: each with one stream as far ahead as possible, and random ones."""
    rng = random.Random(seed)
    waits: dict[int, list[int]] = {}
    for earlier, later in program.waits:
        waits.setdefault(later, []).append(earlier)
    tried: set[tuple[int, ...]] = set()
    # Of streams without launches the order tells nothing.
    used = [stream for stream in Stream if any(launch.stream is stream for launch in program.launches)]
    ranks = [{stream: r for r, stream in enumerate(p)} for p in itertools.permutations(used)]
    for number in range(len(ranks) + count):
        queues = {s: [i for i, launch in enumerate(program.launches) if launch.stream is s] for s in Stream}
        done: set[int] = set()
        tokens: list[int] = []
        while any(queues.values()):
            ready = [s for s in Stream if queues[s] and done.issuperset(waits.get(queues[s][0], ()))]
            if not ready:
                return  # no schedule at all: the program hangs
            stream = min(ready, key=ranks[number].__getitem__) if number < len(ranks) else rng.choice(ready)
            tokens.append(queues[stream].pop(0))
            done.add(tokens[-1])
        if tuple(tokens) not in tried:
            tried.add(tuple(tokens))
            yield tokens


class Reference:
    """Tokens of every value's rows, computed from the graph alone."""

    def __init__(self, plan: Plan, operations: tuple[Operation, ...]) -> None:
        self.plan, self.graph = plan, plan.graph
        self.roots = {op.outputs[0]: op.inputs[0] for op in operations if KINDS[op.kind].view}
        self.operations = {op.name: op for op in operations}
        self.tokens: dict[str, list[int]] = {}
        for name, value in self.graph.values.items():
            if value.role.value != "intermediate":
                rows = self.graph.batch if value.per_sample else 1
                self.tokens[name] = [hash(("start", name, row)) % _MODULUS for row in range(rows)]
        for op in operations:
            if not KINDS[op.kind].view:
                inputs = [self.tokens[self.root(name)] for name in op.inputs]
                for name, rows in self.run(op, inputs, self.whole(op)).items():
                    self.tokens[name] = rows

    def root(self, name: str) -> str:
        return self.roots.get(name, name)

    def whole(self, op: Operation) -> Rows:
        batched = any(self.graph.values[name].per_sample for name in (*op.inputs, *op.outputs))
        return Rows(0, self.graph.batch if batched else 1)

    def run(self, op: Operation, inputs: list[list[int]], rows: Rows) -> dict[str, list[int]]:
        """Return tokens of the outputs' rows, computed from those of the inputs' rows in this slice."""
        kind = KINDS[op.kind]
        sample = [self.graph.values[name].per_sample for name in op.inputs]
        whole = [tuple(tokens) for tokens in inputs]
        hashes: dict[str, list[int]] = {}
        for o, name in enumerate(op.outputs):
            parts = []
            for i, row in enumerate(range(rows.start, rows.stop)):
                seen = (
                    tuple(t[i : i + 1] if s else t for t, s in zip(whole, sample, strict=True))
                    if kind.divisible
                    else tuple(whole)
                )
                place = row if self.graph.values[name].per_sample or kind.accumulates else 0
                parts.append(hash((op.name, o, place, seen)) % _MODULUS)
            if self.graph.values[name].per_sample:
                hashes[name] = parts
            else:
                hashes[name] = [sum(parts) % _MODULUS if kind.accumulates else parts[0]]
        return hashes


class Machine:
    """A memory, and the launches that run on it."""

    def __init__(self, plan: Plan, program: Program, reference: Reference) -> None:
        self.plan, self.program, self.reference = plan, program, reference
        self.memory: dict[tuple[str, int], tuple[int, int]] = {}
        for index in program.entry:
            buffer = plan.buffers[index]
            for row, token in enumerate(reference.tokens[buffer.value or ""]):
                self.store(index, row, token)

    def cells(self, index: int, row: int) -> list[tuple[str, int]]:
        """Return the cells of one row of a buffer."""
        buffer = self.plan.buffers[index]
        row_bytes = buffer.size_bytes // buffer.rows.count
        start = self.plan.offsets[index] + (row - buffer.rows.start) * row_bytes
        return [(buffer.space.value, at) for at in range(start, start + row_bytes, GRAIN_BYTES)]

    def store(self, index: int, row: int, token: int) -> None:
        for k, cell in enumerate(self.cells(index, row)):
            self.memory[cell] = (token, k)

    def load(self, index: int, row: int) -> int:
        tokens = [self.memory.get(cell) for cell in self.cells(index, row)]
        token = tokens[0][0] if tokens[0] else None
        if token is not None and tokens == [(token, k) for k in range(len(tokens))]:
            return token
        return hash(("garbage", tuple(tokens))) % _MODULUS

    def run(self, number: int, launch: Launch) -> None:
        if not launch.operations:
            source, target = launch.accesses
            rows = range(source.rows.start, source.rows.stop)
            tokens = [self.load(source.buffer, row) for row in rows]
            for row, token in zip(range(target.rows.start, target.rows.stop), tokens, strict=True):
                self.store(target.buffer, row, token)
            return
        op = self.reference.operations[launch.operations[0]]
        reads, writes = launch.accesses[: len(op.inputs)], launch.accesses[len(op.inputs) :]
        sample = [a.rows for a, n in zip(reads, op.inputs, strict=True) if self.plan.graph.values[n].per_sample]
        sample += [a.rows for a, n in zip(writes, op.outputs, strict=False) if self.plan.graph.values[n].per_sample]
        rows = sample[0] if sample else self.reference.whole(op)
        inputs = [[self.load(a.buffer, row) for row in range(a.rows.start, a.rows.stop)] for a in reads]
        results = self.reference.run(op, inputs, rows)
        for access, name in zip(writes, op.outputs, strict=False):
            for row, token in zip(range(access.rows.start, access.rows.stop), results[name], strict=True):
                old = self.load(access.buffer, row) if access.mode is Mode.ACCUMULATE else 0
                self.store(access.buffer, row, (old + token) % _MODULUS)
        for access in writes[len(op.outputs) :]:
            _, start, stop = byte_range(self.plan, access)
            for at in range(start, stop, GRAIN_BYTES):
                self.memory[self.plan.buffers[access.buffer].space.value, at] = (number, -1)

    def holds(self, index: int, value: str) -> bool:
        """Return whether the buffer holds all of the value's rows."""
        tokens = self.reference.tokens[value]
        return self.plan.buffers[index].value == value and tokens == [
            self.load(index, row) for row in range(len(tokens))
        ]


def is_right(plan: Plan, seed: int = 0, count: int = 4) -> bool:
    """Return whether both programs compute their graphs in every schedule that was tried."""
    graph = plan.graph
    finals = dict(graph.updates)
    for program, operations, results in (
        (plan.train, graph.train, (*graph.outputs, graph.loss, *graph.metrics)),
        (plan.infer, graph.infer, graph.infer_outputs),
    ):
        reference = Reference(plan, operations)
        tried = 0
        for schedule in schedules(program, seed, count):
            tried += 1
            try:
                machine = Machine(plan, program, reference)
                for number in schedule:
                    machine.run(number, program.launches[number])
            except (ValueError, IndexError, KeyError):
                return False  # operands that do not fit their operation
            for name in results:
                root = reference.root(name)
                if not any(machine.holds(index, root) for index in program.exit):
                    return False
            for index in program.entry:
                name = plan.buffers[index].value or ""
                if graph.values[name].role.persistent:
                    final = finals.get(name, name) if program is plan.train else name
                    ends = [i for i in program.exit if plan.buffers[i].value == final]
                    same = [i for i in ends if plan.offsets[i] == plan.offsets[index]]
                    if not any(machine.holds(i, final) for i in same):
                        return False
        if not tried:
            return False
    return True
