"""Every operation in float64: gradients against finite differences and PyTorch, and division by rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.ir.graph import Network, Operation, Optimizer, TrainingGraph
from mbc.ir.metrics import name_of
from mbc.ir.types import Precision
from mbc.ops import KINDS
from mbc.ops.augment import Augment
from mbc.ops.base import Array, Call
from mbc.ops.random import Dropout
from mbc.passes.check_graph import verify_network, verify_training
from mbc.passes.training_step import differentiate
from tests.ir.execution import draw, new_control, normalised, parameter_gradients, step, types_of
from tests.ir.networks import Writer
from tests.ops.cases import CASES

LIGHT = settings(
    max_examples=20,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
)
STEP = 1e-5


def _graph(network: Network) -> TrainingGraph:
    verify_network(network)
    graph = differentiate(network, Optimizer(), Precision.FP64)
    verify_training(graph)
    return graph


def _run(graph: TrainingGraph, start: dict[str, Array]) -> dict[str, Array]:
    return step(graph, start, new_control(step=5, seed=(7 << 32) + 11))


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@LIGHT
def test_gradients_are_the_slope_of_the_loss(case: str, data: st.DataObject) -> None:
    graph = _graph(CASES[case](data.draw))
    rng = np.random.default_rng(1)
    start = draw(graph, rng)
    gradients = parameter_gradients(graph, _run(graph, start))
    assert gradients
    for name, gradient in gradients.items():
        for _ in range(2):
            direction = rng.choice((-1.0, 1.0), gradient.shape)
            up = _run(graph, {**start, name: start[name] + STEP * direction})[graph.loss][0]
            down = _run(graph, {**start, name: start[name] - STEP * direction})[graph.loss][0]
            slope = (up - down) / (2 * STEP)
            size = max(float(np.abs(gradient).sum()), abs(slope), 1e-3)
            assert abs(slope - float((gradient * direction).sum())) <= 1e-6 * size, name


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@LIGHT
def test_values_and_gradients_are_those_of_pytorch(case: str, data: st.DataObject) -> None:
    pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    from tests.ir import oracle

    network = CASES[case](data.draw)
    graph = _graph(network)
    start = draw(graph, np.random.default_rng(2))
    env = _run(graph, start)
    theirs, gradients = oracle.run(network, start, seed=(7 << 32) + 11, step=5)
    for ours, name in zip(graph.outputs, network.outputs, strict=True):
        assert normalised(env[ours], theirs[name]) <= 1e-10
    named = (value for value in graph.metrics if name_of(value) is not None)
    for ours, (_, terms) in zip(named, network.metrics, strict=True):
        assert abs(env[ours][0] - sum(weight * theirs[value].item() for value, weight in terms)) <= 1e-10
    actual = parameter_gradients(graph, env)
    assert actual.keys() == gradients.keys()
    for name, gradient in actual.items():
        # A gradient that is zero in exact arithmetic has no relative error: measured against the others' size.
        scale = max(np.linalg.norm(gradients[name]), 1e-3)
        assert np.linalg.norm(gradient - gradients[name]) <= 1e-10 * scale, name
    for state, after in graph.updates:
        if "running" in state:
            assert normalised(env[after], theirs[state]) <= 1e-12


def test_no_gradient_flows_through_a_detached_tensor() -> None:
    w = Writer(2)
    x, y = w.parameter("x", 2, 3), w.parameter("y", 2, 3)
    gate = w("detach", w("mul", x, y))
    product = w("mul", x, w("detach", gate))
    network = w.finish((product, gate), ((w("mse", product, w.input("wanted", 3)), 1.0),))
    graph = _graph(network)
    env = _run(graph, draw(graph, np.random.default_rng(5)))
    gradients = parameter_gradients(graph, env)
    slope = 2 * (env[graph.outputs[0]] - env["wanted"]) / 6
    assert set(gradients) == {"x"}
    np.testing.assert_allclose(gradients["x"], slope * env["x"] * env["y"], rtol=1e-12)
    # What is detached is the tensor itself; what leaves the network is a copy.
    kinds = [op.kind for op in (*graph.train, *graph.infer)]
    assert "detach" not in kinds and kinds.count("scale") == 2
    np.testing.assert_array_equal(env[graph.outputs[1]], env["x"] * env["y"])


def test_a_loss_behind_detached_tensors_only_trains_nothing() -> None:
    w = Writer(2)
    x = w("detach", w.parameter("x", 2, 3))
    network = w.finish((x,), ((w("mse", x, w.input("wanted", 3)), 1.0),))
    with pytest.raises(MbcError) as caught:
        differentiate(network, Optimizer(), Precision.FP64)
    assert caught.value.code == "MBC051"


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@LIGHT
def test_divisible_operations_may_be_divided(case: str, data: st.DataObject) -> None:
    graph = _graph(CASES[case](data.draw))
    env = _run(graph, draw(graph, np.random.default_rng(3)))
    for op in graph.train:
        with_rows = op.outputs[0] if KINDS[op.kind].broadcasts else op.inputs[0]
        if KINDS[op.kind].divisible and graph.batch > 1 and types_of(graph)[with_rows].shape[0] == graph.batch:
            cut = data.draw(st.integers(1, graph.batch - 1))
            _check_division(graph, op, env, cut)


def _check_division(graph: TrainingGraph, op: Operation, env: dict[str, Array], cut: int) -> None:
    kind, types = KINDS[op.kind], types_of(graph)
    # Here operands are parameters, so the kinds decide which have rows: vectors over channels have none.
    whole = {"batch_normalize": 1, "batch_normalize_backward_reduce": 2, "batch_normalize_backward": 2}.get(op.kind)
    whole = {"group_norm": 1, "layer_norm": 1, "group_norm_backward": 4, "layer_norm_backward": 4}.get(op.kind, whole)
    whole = {"instance_normalize": 3, "instance_normalize_backward": 6}.get(op.kind, whole)
    vectors = op.kind in ("bias_add", "batch_normalize_backward_frozen")
    if whole is None:
        whole = len(op.inputs) if kind.reduces or not kind.working_inputs else 1
        whole = 1 if vectors or isinstance(op.attributes, Dropout | Augment) else whole
    rank = len(types[op.outputs[0]].shape)
    rowless = kind.rowless(op.attributes, len(op.inputs)) if kind.rowless else ()
    with_rows = [
        len(types[v].shape) == rank and types[v].shape[0] == graph.batch
        if kind.broadcasts
        else i < whole and i not in rowless
        for i, v in enumerate(op.inputs)
    ]
    parts = []
    for start, stop in ((0, cut), (cut, graph.batch)):
        operands = [env[v][start:stop] if with_rows[i] else env[v] for i, v in enumerate(op.inputs)]
        outputs = tuple(types[v] if kind.reduces else types[v].with_rows(stop - start) for v in op.outputs)
        assert kind.evaluate is not None
        parts.append(kind.evaluate(op.attributes, operands, Call(outputs, start, graph.batch, Precision.FP64)))
    for number, name in enumerate(op.outputs):
        pieces = [part[number] for part in parts]
        together = pieces[0] + pieces[1] if kind.reduces else np.concatenate(pieces)
        np.testing.assert_allclose(together, env[name], rtol=1e-11, atol=1e-11, err_msg=f"{op.name} {name}")


def test_the_cases_cover_every_operation() -> None:
    seen: set[str] = set()

    @given(data=st.data())
    @settings(LIGHT, max_examples=6)
    def collect(case: str, data: st.DataObject) -> None:
        graph = _graph(CASES[case](data.draw))
        seen.update(op.kind for op in graph.train)

    for case in CASES:
        collect(case)
    # Some exist in networks only; casts, ends of steps, signs, what transforms make and what is of several ranks have
    # their own tests.
    alone = {"batch_norm", "weighted_cross_entropy", "dice", "counted_top_k", "mean_iou", "inner_product"}
    alone |= {"cast", "relu_mask", "relu_backward_masked", "accumulate", "check_loss", "adamw_update", "ema_update"}
    alone |= {"lars_ratio", "lars_update", "lamb_ratio", "lamb_update"}
    alone |= {"rms_norm", "rms_norm_backward", "rms_norm_backward_reduce"}
    alone |= {"detach", "state", "all_reduce", "all_gather", "gather_rows", "sum_gathered", "combine_statistics"}
    alone |= {"reduce_scatter", "gather_parts", "sgd_update_part", "adamw_update_part", "norm"}
    missing = sorted(KINDS.keys() - seen - alone)
    assert not missing, f"add networks that have {', '.join(missing)} to tests/ops/cases.py"
    assert not alone & seen
