"""The chosen layouts are the fastest: no labelling of random networks with random times is faster."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout, TensorType, layout_matters
from mbc.kernels.base import Acceptance, Arguments, Call, Candidate, Request
from mbc.ops import KINDS
from mbc.ops.fused import Fused
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.emit_launches import emit_launches
from mbc.optimize.schedule.simulate import simulate
from mbc.optimize.selection.layout_mincut import Options
from mbc.optimize.selection.select import best_within, choose
from mbc.options import UNLIMITED_BYTES
from tests.graphs import training_graph

SOURCE = """
network small(batch = 2) {
  input image[batch, 2, 4, 4] : float
  input target[batch] : class
  x = image |> conv(2, 3, pad=1) |> relu
  y = x |> conv(2, 1)
  logits = x + y |> flatten |> linear(2)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
"""
# Two readers of one value, concatenation, pooling, a layer used twice, a second output, views: too wide to try all.
WIDE = """
network wide(batch = 2) {
  input image[batch, 2, 8, 8] : float
  input target[batch] : class
  twice = conv(4, 3, pad=1)
  x = image |> conv(4, 3, pad=1) |> bn |> relu
  a = x |> twice |> maxpool(2)
  b = x |> conv(4, 1) |> twice |> avgpool(2)
  y = (a, b, a) |> concat |> conv(4, 1) |> relu
  features = y |> global_avgpool
  logits = features |> flatten |> linear(2)
  side = y |> flatten |> linear(2)
  output logits, features
  loss (logits, target) |> softmax_cross_entropy
  loss (side, target) |> softmax_cross_entropy
}
"""
# Class numbers of pixels are no image, though they have as many dimensions.
PIXELS = """
network pixels(batch = 2) {
  input image[batch, 2, 4, 4] : float
  input target[batch, 4, 4] : class
  logits = image |> conv(2, 1)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
"""
LEAST = 1.0


GRAPH = training_graph(SOURCE)
WIDE_GRAPH = training_graph(WIDE)


@dataclass(frozen=True)
class Drawn:
    """A provider of every kind in both layouts, with given times by kind and layout."""

    times_us: Mapping[tuple[str, Layout], float]
    name: str = "drawn"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        types = (*request.inputs, *request.outputs)
        if isinstance(request.attributes, Fused):
            return  # labelled one by one
        for layout in Layout:
            layouts = tuple(layout if t.ordered else Layout.CHANNELS_FIRST for t in types)
            time_us = self.times_us.get((request.kind, layout), LEAST)
            yield Candidate(self.name, request.kind, (), layouts, 0, time_us, False, True, True)

    def arguments(self, call: Call, first_row: int) -> Arguments:
        return Arguments()

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        return Acceptance()


@dataclass
class Table(CandidateTable):
    change_us: float = 0.0

    def conversion_us(self, type_: TensorType, target: Layout) -> float:
        return self.change_us


KINDS_DRAWN = (
    "convolution",
    "convolution_backward_data",
    "convolution_backward_filter",
    "relu",
    "relu_backward",
    "add",
)
WIDE_KINDS = (
    "batch_normalize",
    "concat",
    "channel_slice",
    "max_pool",
    "max_pool_backward",
    "avg_pool",
    "avg_pool_backward",
)


def by_brute_force(table: Table, graph: TrainingGraph) -> float:
    """Return the fastest labelling of the training step's operations and states among all that the rules allow."""
    asked = [o for o in graph.train if not KINDS[o.kind].view]
    options = {o.name: best_within(table.fronts(o), UNLIMITED_BYTES) for o in asked}
    free = [o for o in asked if len(options[o.name]) > 1]
    states = [s.value for s in graph.states if layout_matters(graph.values[s.value].type.shape)]
    best = float("inf")
    for labels in itertools.product(Layout, repeat=len(free) + len(states)):
        chosen = {o.name: label for o, label in zip(free, labels, strict=False)}
        home = dict(zip(states, labels[len(free) :], strict=True))
        best = min(best, total_us(table, graph, options, chosen, home))
    return best


def total_us(
    table: Table,
    graph: TrainingGraph,
    options: Mapping[str, Options],
    chosen: Mapping[str, Layout],
    home: dict[str, Layout],
) -> float:
    home = home | dict.fromkeys(graph.inputs, Layout.CHANNELS_FIRST)
    converted: set[tuple[str, Layout]] = set()
    total = 0.0

    def read(name: str, layout: Layout) -> None:
        if layout_matters(graph.values[name].type.shape) and home[name] is not layout:
            converted.add((name, layout))

    def run(operation: Operation) -> bool:
        nonlocal total
        if KINDS[operation.kind].view:
            read(operation.inputs[0], Layout.CHANNELS_FIRST)
            home[operation.outputs[0]] = Layout.CHANNELS_FIRST
            return True
        points = options[operation.name]
        wanted = chosen.get(operation.name)
        layouts = next(
            k
            for k in points
            if wanted is None or (wanted in k and (wanted is not Layout.CHANNELS_FIRST or set(k) == {wanted}))
        )
        total += points[layouts].time_us
        names = (*operation.inputs, *operation.outputs)
        updated = {operation.inputs[i] for _, i in KINDS[operation.kind].updates if i < len(operation.inputs)}
        for place, (name, layout) in enumerate(zip(names, layouts, strict=True)):
            if place >= len(operation.inputs):
                home[name] = layout
            elif name in updated and layout_matters(graph.values[name].type.shape) and home[name] is not layout:
                return False
            else:
                read(name, layout)
        return True

    if not all(run(operation) for operation in graph.train):
        return float("inf")
    return total + table.change_us * len(converted)


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(KINDS_DRAWN), st.sampled_from(list(Layout))), st.integers(1, 30).map(float)
    ),
    st.integers(0, 12).map(float),
)
def test_no_labelling_is_faster(times_us: Mapping[tuple[str, Layout], float], change_us: float):
    table = Table(GRAPH, find_spec("h200"), (Drawn(times_us),), change_us=change_us)
    choices = choose(table, {})
    assert abs(choices.train_us - by_brute_force(table, GRAPH)) < 1e-3
    # And the launches of the plan take just that: one conversion a value and layout.
    assert abs(simulate(emit_launches(table, choices).train) - choices.train_us) < 1e-3


TIMES = st.dictionaries(
    st.tuples(st.sampled_from((*KINDS_DRAWN, *WIDE_KINDS)), st.sampled_from(list(Layout))),
    st.integers(1, 30).map(float),
)


@settings(max_examples=10)
@given(TIMES, st.integers(0, 12).map(float), st.randoms(use_true_random=False))
def test_nothing_near_or_at_random_is_faster_in_a_wide_network(
    times_us: Mapping[tuple[str, Layout], float], change_us: float, random: Random
):
    table = Table(WIDE_GRAPH, find_spec("h200"), (Drawn(times_us),), change_us=change_us)
    choices = choose(table, {})
    options = {
        o.name: best_within(table.fronts(o), UNLIMITED_BYTES) for o in WIDE_GRAPH.train if not KINDS[o.kind].view
    }
    chosen = {
        name: Layout.CHANNELS_LAST
        if Layout.CHANNELS_LAST in choices.operations[name].layouts
        else Layout.CHANNELS_FIRST
        for name, points in options.items()
        if len(points) > 1
    }
    home = {s.value: choices.states[s.value] for s in WIDE_GRAPH.states}

    def total(flipped: Iterable[str]) -> float:
        flipped = set(flipped)
        operations, states = (
            {name: _other(layout) if name in flipped else layout for name, layout in labels.items()}
            for labels in (chosen, home)
        )
        return total_us(table, WIDE_GRAPH, options, operations, states)

    assert abs(total(()) - choices.train_us) < 1e-3
    assert abs(simulate(emit_launches(table, choices).train) - choices.train_us) < 1e-3
    names = [*chosen, *(s for s in home if layout_matters(WIDE_GRAPH.values[s].type.shape))]
    near = [(a,) for a in names] + random.sample(list(itertools.combinations(names, 2)), 100)
    far = [random.sample(names, random.randint(3, len(names))) for _ in range(50)]
    assert all(total(flipped) > choices.train_us - 1e-3 for flipped in near + far)


def test_class_numbers_of_pixels_keep_a_loss_from_no_layout():
    graph = training_graph(PIXELS)
    slow = {(kind, Layout.CHANNELS_FIRST): 9.0 for kind in {operation.kind for operation in graph.train}}
    choices = choose(Table(graph, find_spec("h200"), (Drawn(slow),), change_us=5.0), {})
    (loss,) = (o for o in graph.train if o.kind == "softmax_cross_entropy")
    logits, target, *_ = choices.operations[loss.name].layouts
    assert (logits, target) == (Layout.CHANNELS_LAST, Layout.CHANNELS_FIRST)


def _other(layout: Layout) -> Layout:
    return Layout.CHANNELS_LAST if layout is Layout.CHANNELS_FIRST else Layout.CHANNELS_FIRST
