"""Small random networks with random, valid plans: divided, in place, on three streams, with conversions.

Everything here is naive on purpose and shares nothing with `mbc.optimize` or the verifier.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, fields, replace

from mbc.hardware.streams import Space, Stream
from mbc.ir.graph import Initializer, Operation, Optimizer, Role, State, TrainingGraph, Value
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.cuda import KERNELS
from mbc.ops import KINDS
from mbc.plan.model import Access, Bounds, Buffer, Copy, Kernel, Launch, Mode, Plan, Predictions, Program, Rows, Target
from mbc.source import Source, Span

SOURCE = Source("chain.mbc", "network chain(batch = 4) {\n  # made by a test\n}\n")
TARGET = Target("H200", "sm_90", 132, 150_000_000_000, 0)

# Of one rank: collectives have theirs for themselves.
STREAMS = tuple(stream for stream in Stream if stream is not Stream.COLLECTIVE)


@dataclass
class GraphMaker:
    """Collects a chain of linear layers and its gradient."""

    batch: int
    values: dict[str, Value] = field(default_factory=dict)
    train: list[Operation] = field(default_factory=list)
    infer: list[Operation] = field(default_factory=list)

    def value(
        self, name: str, shape: tuple[int, ...], dtype: DType = DType.FP32, role: Role = Role.INTERMEDIATE
    ) -> str:
        per_sample = role is Role.INPUT or (bool(shape) and shape[0] == -1)
        shape = tuple(self.batch if n == -1 else n for n in shape)
        self.values[name] = Value(name, TensorType(shape, dtype), role, per_sample, Span(SOURCE, 1, 9, 5))
        return name

    def op(self, name: str, kind: str, inputs: list[str], outputs: list[str], width: int = 0, infer: bool = False):
        operation = Operation(name, kind, tuple(inputs), tuple(outputs), default_attributes(kind, width))
        (self.infer if infer else self.train).append(operation)


def default_attributes(kind: str, width: int):
    """Return the attributes of an operation whose `x` has `width` features."""
    cls = KINDS[kind].attributes
    settings = {"sample_shape": (width,), "smoothing": 0.0, "weight": 1.0}
    return cls(**{f.name: settings[f.name] for f in fields(cls) if f.name in settings})


def chain_graph(batch: int, widths: list[int], biases: bool = True) -> TrainingGraph:
    """Return a chain: image -> flatten -> (linear, bias_add, relu)* -> softmax cross-entropy, with gradient and sgd."""
    g = GraphMaker(batch)
    g.value("image", (-1, 2, 1, 3), role=Role.INPUT)
    g.value("target", (-1,), DType.INT32, Role.INPUT)
    g.value("control", (256,), DType.UINT8, Role.CONTROL)
    states = ["control"]
    x = {"train": g.value("flat", (-1, 6)), "infer": g.value("i.flat", (-1, 6))}
    g.op("flat", "flatten", ["image"], [x["train"]])
    g.op("i.flat", "flatten", ["image"], [x["infer"]], infer=True)
    layers = []
    width_in = 6
    for i, width in enumerate(widths):
        w = g.value(f"l{i}.weight", (width, width_in), role=Role.PARAMETER)
        b = g.value(f"l{i}.bias", (width,), role=Role.PARAMETER) if biases else None
        states += [w] + ([b] if b else [])
        inside = x["train"]
        for mode, prefix in (("train", ""), ("infer", "i.")):
            last = g.value(f"{prefix}y{i}", (-1, width))
            g.op(f"{prefix}l{i}", "linear", [x[mode], w], [last], width_in, infer=mode == "infer")
            if b:
                last, before = g.value(f"{prefix}b{i}", (-1, width)), last
                g.op(f"{prefix}l{i}.bias", "bias_add", [before, b], [last], infer=mode == "infer")
            last, before = g.value(f"{prefix}r{i}", (-1, width)), last
            g.op(f"{prefix}relu{i}", "relu", [before], [last], infer=mode == "infer")
            x[mode] = last
        layers.append((i, inside, w, b, x["train"], width, width_in))
        width_in = width
    g.value("loss", (1,))
    g.value("correct", (1,))
    g.op("ce", "softmax_cross_entropy", [x["train"], "target"], ["loss", "correct"])
    gradient = g.value("d.out", (-1, width_in))
    g.op("ce.backward", "softmax_cross_entropy_backward", [x["train"], "target", "control"], [gradient])
    gradients = {}
    for i, inside, w, b, y, width, narrow in reversed(layers):
        dy = g.value(f"d.r{i}", (-1, width))
        g.op(f"relu{i}.backward", "relu_backward", [y, gradient], [dy])
        if b:
            gradients[b] = g.value(f"d.{b}", (width,))
            g.op(f"l{i}.bias.gradient", "channel_sum", [dy], [gradients[b]])
        gradients[w] = g.value(f"d.{w}", (width, narrow))
        g.op(f"l{i}.filter", "linear_backward_filter", [inside, dy], [gradients[w]], narrow)
        if i:
            gradient = g.value(f"d.x{i}", (-1, narrow))
            g.op(f"l{i}.data", "linear_backward_data", [dy, w], [gradient], narrow)
    g.value("control.next", (256,), DType.UINT8)
    g.op("guard", "guard", ["control", "loss"], ["control.next"])
    updates = [("control", "control.next")]
    for name, dw in gradients.items():
        new = g.value(f"{name}.next", g.values[name].type.shape)
        g.op(f"{name}.update", "sgd_update", [name, dw, "control.next"], [new])
        updates.append((name, new))
    return TrainingGraph(
        name="chain",
        batch=batch,
        precision=Precision.FP32,
        optimizer=Optimizer(),
        values=g.values,
        train=tuple(g.train),
        infer=tuple(g.infer),
        states=tuple(State(name, Initializer("constant", float(name == "control"))) for name in states),
        inputs=("image", "target"),
        infer_inputs=("image",),
        outputs=(x["train"],),
        infer_outputs=(x["infer"],),
        loss="loss",
        metrics=("correct",),
        updates=tuple(updates),
    )


@dataclass
class ProgramMaker:
    """Writes one program over shared buffers, with random choices where a planner would choose with care."""

    graph: TrainingGraph
    rng: random.Random
    buffers: list[Buffer]
    where: dict[str, int]
    streams: tuple[Stream, ...]
    launches: list[Launch] = field(default_factory=list)
    entry: list[int] = field(default_factory=list)

    def buffer(self, name: str, alias: int | None = None) -> int:
        value = self.graph.values[name]
        rows = Rows(0, self.graph.batch) if value.per_sample else Rows(0, 1)
        self.buffers.append(
            Buffer(name, rows, Layout.CHANNELS_FIRST, value.type.dtype, value.type.size_bytes, alias=alias)
        )
        return len(self.buffers) - 1

    def run(self, operations, inputs, results, updated) -> Program:
        for name in inputs:
            self.where[name] = self.buffer(name)
            self.entry.append(self.where[name])
        entry = [*self.where.values()]
        roots = {op.outputs[0]: op.inputs[0] for op in operations if KINDS[op.kind].view}
        operations = [op for op in operations if not KINDS[op.kind].view]
        kept = {roots.get(name, name) for name in (*results, *updated.values())}
        for position, op in enumerate(operations):
            names = [roots.get(name, name) for name in op.inputs]
            later = {roots.get(n, n) for after in operations[position + 1 :] for n in after.inputs} | kept
            if self.rng.random() < 0.15:
                self.convert(self.rng.choice(names))
            self.launch(op, [self.where[n] for n in names], later)
        exit_values = dict.fromkeys([*updated.values(), *(roots.get(name, name) for name in results)])
        exits = tuple(dict.fromkeys(self.where[name] for name in exit_values))
        return Program(tuple(self.launches), (), tuple(entry), exits)

    def convert(self, name: str) -> None:
        """Continue with another buffer of the value."""
        if self.graph.values[name].role is not Role.INTERMEDIATE or name.endswith(".next"):
            return  # a state stays where it lies
        old, new = self.where[name], self.buffer(name)
        rows = self.buffers[old].rows
        work = self.rng.choice([Kernel("mbc", "convert", (), 1.0, False), Copy(1.0, False)])
        accesses = (Access(old, rows, Mode.READ), Access(new, rows, Mode.WRITE))
        self.launches.append(Launch(work, (), self.rng.choice(self.streams), accesses))
        self.where[name] = new

    def launch(self, op: Operation, inputs: list[int], later: set[str]) -> None:
        kind = KINDS[op.kind]
        must = {o: i for o, i in kind.updates if o < len(op.outputs)}
        may = dict(kind.in_place)
        outputs = []
        for o, name in enumerate(op.outputs):
            alias = inputs[must[o]] if o in must else None
            if alias is None and o in may:
                old = inputs[may[o]]
                same = self.buffers[old].size_bytes == self.graph.values[name].type.size_bytes
                dead = self.buffers[old].value not in later and old not in self.entry and inputs.count(old) == 1
                if same and dead and self.rng.random() < 0.6:
                    alias = old
            outputs.append(self.buffer(name, alias))
        for name, buffer in zip(op.outputs, outputs, strict=True):
            self.where[name] = buffer
        batched = any(self.graph.values[n].per_sample for n in (*op.inputs, *op.outputs))
        cuts = [0, self.graph.batch]
        if batched and kind.divisible and self.rng.random() < 0.6:
            cuts = sorted({*cuts, self.rng.randrange(self.graph.batch + 1)})
        parts = [Rows(a, b) for a, b in itertools.pairwise(cuts)]
        for number, part in enumerate(parts):
            accesses = [self.access(b, part, Mode.READ) for b in inputs]
            accesses += [self.access(b, part, Mode.ACCUMULATE if number else Mode.WRITE) for b in outputs]
            if self.rng.random() < 0.3:
                size_bytes = 4 * self.rng.randrange(1, 200)
                self.buffers.append(Buffer(None, Rows(0, 1), Layout.CHANNELS_FIRST, DType.UINT8, size_bytes))
                accesses.append(Access(len(self.buffers) - 1, Rows(0, 1), Mode.WRITE))
            own = KERNELS.get(op.kind) or next(k for k in KERNELS.values() if k.kind == op.kind)
            work = Kernel("mbc", own.name, own.settings, self.rng.randrange(1, 50) / 2, self.rng.random() < 0.5)
            self.launches.append(Launch(work, (op.name,), self.rng.choice(self.streams), tuple(accesses)))

    def access(self, buffer: int, part: Rows, mode: Mode) -> Access:
        if self.graph.values[self.buffers[buffer].value or ""].per_sample:
            return Access(buffer, part, Mode.WRITE if mode is Mode.ACCUMULATE else mode)
        return Access(buffer, Rows(0, 1), mode)


def byte_range(plan: Plan, access: Access) -> tuple[Space, int, int]:
    buffer = plan.buffers[access.buffer]
    row_bytes = buffer.size_bytes // buffer.rows.count
    start = plan.offsets[access.buffer] + (access.rows.start - buffer.rows.start) * row_bytes
    return buffer.space, start, start + access.rows.count * row_bytes


def round_up(size_bytes: int) -> int:
    return (size_bytes + 255) // 256 * 256


def owner(buffers, index: int) -> int:
    while buffers[index].alias is not None:
        index = buffers[index].alias
    return index


def lives(buffers, program: Program, persistent: set[int]) -> dict[int, tuple[int, int]]:
    """Return the lifetime of each buffer that owns its bytes."""
    count = len(program.launches)
    touched: dict[int, list[int]] = {}
    for b in program.entry:
        touched.setdefault(owner(buffers, b), []).append(0)
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            touched.setdefault(owner(buffers, access.buffer), []).append(i)
    for b in program.exit:
        touched.setdefault(owner(buffers, b), []).append(count - 1)
    return {b: (0, count) if b in persistent else (min(times), max(times) + 1) for b, times in touched.items()}


def naive_live_bytes(plan: Plan) -> int:
    states = {name for name, value in plan.graph.values.items() if value.role.persistent}
    persistent = {b for b in plan.train.entry if plan.buffers[b].value in states}
    most = 0
    for program in (plan.train, plan.infer):
        spans = lives(plan.buffers, program, persistent)
        for i in range(len(program.launches)):
            live = sum(
                round_up(plan.buffers[b].size_bytes)
                for b, (start, stop) in spans.items()
                if start <= i < stop and plan.buffers[b].space is Space.ARENA
            )
            most = max(most, live)
    return most


def place(buffers, programs, persistent: list[int], rng: random.Random, tight: bool) -> list[int]:
    """Place buffers first fit in a random order, with gaps of 256 bytes here and there unless `tight`."""
    # (program, space) -> (start, stop, low, high)
    taken: dict[tuple[int, Space], list[tuple[int, int, int, int]]] = {}
    offsets = [0] * len(buffers)
    base = 0
    for b in persistent:
        offsets[b] = base
        base += round_up(buffers[b].size_bytes)
    for number, program in enumerate(programs):
        spans = lives(buffers, program, set(persistent))
        order = sorted(b for b in spans if b not in persistent)
        rng.shuffle(order)
        for b in order:
            start, stop = spans[b]
            size_bytes = round_up(buffers[b].size_bytes)
            space = buffers[b].space
            offset = (base if space is Space.ARENA else 0) + (0 if tight else 256 * rng.randrange(2))
            others = taken.setdefault((number, space), [])
            while any(
                s < stop and start < e and low < offset + size_bytes and offset < high for s, e, low, high in others
            ):
                offset += 256
            others.append((start, stop, offset, offset + size_bytes))
            offsets[b] = offset
    return [offsets[owner(buffers, b)] for b in range(len(buffers))]


def needed_waits(plan: Plan, program: Program) -> tuple[tuple[int, int], ...]:
    """Return waits for all conflicts between streams that earlier waits do not order."""
    touched = [[(*byte_range(plan, a), a.mode) for a in launch.accesses] for launch in program.launches]
    before: list[set[int]] = []
    waits = []
    for j, launch in enumerate(program.launches):
        finished: set[int] = set()
        for i in range(j):
            if program.launches[i].stream is launch.stream:
                finished |= before[i] | {i}
        for i in reversed(range(j)):
            conflict = any(
                s == t and low < top and bottom < high and not (m is Mode.READ and n is Mode.READ)
                for s, low, high, m in touched[i]
                for t, bottom, top, n in touched[j]
            )
            if conflict and i not in finished:
                waits.append((i, j))
                finished |= before[i] | {i}
        before.append(finished)
    return tuple(waits)


def with_figures(plan: Plan) -> Plan:
    """Return the plan with the figures that follow from its buffers."""
    end = dict.fromkeys(Space, 0)
    for buffer, offset in zip(plan.buffers, plan.offsets, strict=True):
        end[buffer.space] = max(end[buffer.space], offset + round_up(buffer.size_bytes))
    predictions = replace(plan.predictions, arena_bytes=end[Space.ARENA], host_bytes=end[Space.HOST])
    return replace(plan, predictions=predictions, bounds=replace(plan.bounds, live_bytes=naive_live_bytes(plan)))


def random_plan(
    seed: int, streams: tuple[Stream, ...] = STREAMS, layers: int | None = None, widths=None, rewrite=None
) -> Plan:
    """Return a valid plan of a random chain, which depends only on the arguments.

    `rewrite(graph, buffers, program, rng)` may add buffers and launches to the programs before addresses are assigned.
    """
    rng = random.Random(seed)
    batch = rng.randrange(2, 6)
    graph = chain_graph(
        batch, widths or [rng.randrange(2, 40) for _ in range(layers or rng.randrange(1, 4))], rng.random() < 0.7
    )
    finals = dict(graph.updates)
    buffers: list[Buffer] = []
    states: dict[str, int] = {}
    shared = ProgramMaker(graph, rng, buffers, states, streams)
    for name in (state.value for state in graph.states):
        states[name] = shared.buffer(name)
    persistent = list(states.values())
    results = (*graph.outputs, graph.loss, *graph.metrics)
    train = ProgramMaker(graph, rng, buffers, dict(states), streams).run(
        graph.train, graph.inputs, results, {name: finals.get(name, name) for name in states}
    )
    infer = ProgramMaker(graph, rng, buffers, dict(states), streams).run(
        graph.infer, graph.infer_inputs, graph.infer_outputs, {name: name for name in states}
    )
    if rewrite is not None:
        train, infer = (rewrite(graph, buffers, program, rng) for program in (train, infer))
    offsets = place(buffers, (train, infer), persistent, rng, rng.random() < 0.7)
    time_us = sum(launch.work.time_us for launch in train.launches)
    plan = Plan(
        version="0.1.0",
        graph=graph,
        target=TARGET,
        budget_bytes=10**9,
        buffers=tuple(buffers),
        offsets=tuple(offsets),
        train=train,
        infer=infer,
        predictions=Predictions(
            time_us, time_us / 2, time_us * 2, time_us / 3, time_us / 6, time_us, 0.5, 0, 400_000_000, False, 0
        ),
        bounds=Bounds(1000, "l0", 0, time_us / 2),
    )
    plan = replace(
        plan,
        train=replace(train, waits=needed_waits(plan, train)),
        infer=replace(infer, waits=needed_waits(plan, infer)),
    )
    return with_figures(plan)
