"""Whole networks: gradients against PyTorch float64, and the shape of the training graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.ir.control import INITIAL_LOSS_SCALE
from mbc.ir.graph import Network, Optimizer, Ranks, Role, TrainingGraph
from mbc.ir.types import DType, Precision
from mbc.ops import KINDS
from mbc.ops.batch_normalize import MOST_RANKS
from mbc.ops.control_record import control_record
from mbc.ops.normalization import synchronised
from mbc.passes.check_graph import verify_network, verify_training
from mbc.passes.training_step import differentiate
from mbc.resources import folder
from tests.ir.execution import draw, execute, new_control, normalised, parameter_gradients, step, types_of
from tests.ir.networks import Writer, bottleneck_resnet, small

MOMENTUM = Optimizer(momentum=0.9, weight_decay=1e-4)


def residual_two_losses() -> Network:
    w = Writer(4)
    image, target = w.input("image", 3, 9, 9), w.input("target", classes=True)
    x = w("relu", w("bn", w("conv", image, channels=4, kernel=3, stride=2, pad=(1, 0, 1, 0))))
    for _ in range(2):
        y = w("bn", w("conv", w("relu", w("bn", w("conv", x, channels=4, kernel=1))), channels=4, kernel=3, pad=1))
        x = w("relu", w("add", x, y))
    first = w("softmax_cross_entropy", w("linear", w("flatten", x), features=3), target, smoothing=0.1)
    logits = w("linear", w("global_avgpool", x), features=3)
    second = w("softmax_cross_entropy", logits, target)
    return w.finish((logits,), ((second, 1.0), (first, 0.3)))


def inception() -> Network:
    w = Writer(3)
    image, target = w.input("image", 3, 8, 8), w.input("target", classes=True)
    x = w("lrn", w("relu", w("conv", image, channels=4, kernel=3, pad=1, bias=True)))
    branches = [
        w("conv", x, channels=2, kernel=1),
        w("conv", w("silu", w("conv", x, channels=3, kernel=1)), channels=2, kernel=(1, 3), pad=(0, 1)),
        w("conv", w("maxpool", x, kernel=3, stride=1, pad=1), channels=2, kernel=1),
        w("avgpool", x, kernel=3, stride=1, pad=1, count_pad=False),
    ]
    x = w("maxpool", w("concat", *branches), kernel=3, stride=2, ceil=True)
    logits = w("linear", w("dropout", w("global_avgpool", x), p=0.4), features=3)
    return w.finish((logits,), ((w("softmax_cross_entropy", logits, target), 1.0),))


def patches() -> Network:
    """Return a network whose convolutions become matrix products, because their windows do not overlap.

    The convolutions are of the input, of a value with a gradient, and of filters that are used twice.
    """
    w = Writer(3)
    image, target = w.input("image", 3, 16, 24), w.input("target", classes=True)
    x = w("gelu", w("conv", image, channels=5, kernel=4, stride=4, bias=True))
    y = w("conv", w("conv", image, channels=2, kernel=1), channels=5, kernel=(2, 8), stride=(2, 8), path="wide")
    z = w("conv", w("conv", image, channels=2, kernel=3, pad=1), channels=5, kernel=(2, 8), stride=(2, 8), path="wide")
    x = w("concat", w("flatten", x), w("flatten", w("add", y, z)))
    logits = w("linear", x, features=3)
    return w.finish((logits,), ((w("softmax_cross_entropy", logits, target), 1.0),))


def shared_layers() -> Network:
    w = Writer(4)
    a, b = w.input("left", 2, 5, 5), w.input("right", 2, 5, 5)

    def tower(x: str) -> str:
        x = w("gelu", w("bn", w("conv", x, path="conv", channels=3, kernel=3, bias=True), path="bn"))
        return w("tanh", w("linear", x, path="embed", features=4))

    left, right = tower(a), tower(b)
    far = w("mse", left, right)
    both = w("mul", left, right)
    near = w("mse", w("linear", both, path="head", features=2), w.input("wanted", 2))
    return w.finish((both,), ((near, 1.0), (far, -0.1)))


def unet() -> Network:
    w = Writer(2)
    image, target = w.input("image", 1, 8, 8), w.input("mask", 8, 8, classes=True)
    skip = w("leaky_relu", w("bn", w("conv", image, channels=3, kernel=3, pad=1)), slope=0.1)
    x = w("sigmoid", w("conv", w("maxpool", skip, kernel=2), channels=4, kernel=3, pad=1))
    up = w("conv_transpose", x, channels=3, kernel=2, stride=2, bias=True)
    also = w("conv", w("upsample", x, factor=2), channels=2, kernel=1)
    logits = w("conv", w("concat", skip, up, also), channels=3, kernel=1, bias=True)
    return w.finish((logits,), ((w("softmax_cross_entropy", logits, target), 1.0),))


def mobile() -> Network:
    w = Writer(3)
    image, target = w.input("image", 3, 7, 7), w.input("target", classes=True)
    x = w("bn", w("conv", image, channels=4, kernel=3, pad=1), affine=False)
    for stride in (1, 2):
        y = w("relu", w("bn", w("conv", x, channels=8, kernel=1)))
        y = w("relu", w("bn", w("conv", y, channels=8, kernel=3, stride=stride, pad=1, groups=8)))
        y = w("bn", w("conv", y, channels=4, kernel=1))
        x = w("add", x, y) if stride == 1 else y
    logits = w("linear", w("dropout", w("flatten", x), p=0.5), features=3)
    return w.finish((logits,), ((w("softmax_cross_entropy", logits, target), 1.0),))


def deep() -> Network:
    return bottleneck_resnet((2, 1), batch=4, size=33, width=4, classes=3)


NETWORKS: dict[str, Callable[[], Network]] = {
    f.__name__: f for f in (small, residual_two_losses, inception, patches, shared_layers, unet, mobile, deep)
}


def graph_of(network: Network, precision: Precision, optimizer: Optimizer = MOMENTUM) -> TrainingGraph:
    verify_network(network)
    graph = differentiate(network, optimizer, precision)
    verify_training(graph)
    return graph


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_whole_networks_are_those_of_pytorch(name: str) -> None:
    pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    from tests.ir import oracle

    network = NETWORKS[name]()
    graph = graph_of(network, Precision.FP64)
    start = draw(graph, np.random.default_rng(4))
    env = step(graph, start, new_control(step=9, seed=3))
    theirs, gradients = oracle.run(network, start, seed=3, step=9)
    ours = parameter_gradients(graph, env)
    assert ours.keys() == gradients.keys()
    assert len(ours) == sum(v.role is Role.PARAMETER for v in network.values.values())
    scale = max(float(np.linalg.norm(g)) for g in gradients.values())
    for parameter, gradient in ours.items():
        # The bias before a batch norm has no gradient but rounding: compared on the scale of the others.
        size = max(float(np.linalg.norm(gradients[parameter])), 1e-6 * scale)
        assert np.linalg.norm(gradient - gradients[parameter]) <= 1e-8 * size, parameter
    total = sum(weight * theirs[loss].item() for loss, weight in network.losses)
    assert env[graph.loss][0] == pytest.approx(total, rel=1e-12)
    for state, after in graph.updates:
        if network.values.get(state) and network.values[state].role is Role.STATISTIC:
            assert normalised(env[after], theirs[state]) <= 1e-12, state


@pytest.mark.parametrize("name", NETWORKS)
def test_inference_uses_running_statistics_and_no_dropout(name: str) -> None:
    pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    from tests.ir import oracle

    network = NETWORKS[name]()
    graph = graph_of(network, Precision.FP64)
    start = draw(graph, np.random.default_rng(5))
    given = {n: a for n, a in start.items() if n not in graph.inputs or n in graph.infer_inputs}
    env = execute(graph.infer, types_of(graph), given, graph.batch)
    theirs, _ = oracle.run(network, start, training=False)
    for ours, output in zip(graph.infer_outputs, network.outputs, strict=True):
        assert normalised(env[ours], theirs[output]) <= 1e-10


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_precision_gives_a_graph_of_its_types(name: str, precision: Precision) -> None:
    graph = graph_of(NETWORKS[name](), precision)
    for op in graph.train:
        for index in KINDS[op.kind].working_inputs:
            assert graph.values[op.inputs[index]].type.dtype is precision.working
    gradients = [op.inputs[1] for op in graph.train if op.kind == "sgd_update"]
    assert {graph.values[g].type.dtype for g in gradients} == {precision.master}
    start = draw(graph, np.random.default_rng(6))
    env = step(graph, start, new_control(loss_scale=1024.0 if precision is Precision.FP16 else 1.0))
    reference_graph = graph_of(NETWORKS[name](), Precision.FP64)
    reference = step(reference_graph, {n: _wide(a) for n, a in start.items()})
    ours, theirs = parameter_gradients(graph, env), parameter_gradients(reference_graph, reference)
    factor = 1024.0 if precision is Precision.FP16 else 1.0
    scale = max(float(np.linalg.norm(g)) for g in theirs.values())
    # Nothing but tf32 rounds here (storage does, and there is none): the graphs mean the same.
    errors = [
        float(np.linalg.norm(gradient / factor - theirs[p]) / max(np.linalg.norm(theirs[p]), 1e-2 * scale))
        for p, gradient in ours.items()
    ]
    if precision is Precision.TF32:
        assert np.median(errors) <= 2e-2  # a relu whose sign its rounding turns may move one parameter further
    else:
        assert max(errors) <= (1e-8 if precision is Precision.FP64 else 1e-4)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def test_gradients_of_the_image_are_not_computed() -> None:
    graph = graph_of(small(), Precision.FP32)
    assert "d.image" not in graph.values
    assert "conv1.backward_filter" in {op.name for op in graph.train}
    assert "conv1.backward_data" not in {op.name for op in graph.train}


def test_names_are_those_that_are_promised() -> None:
    graph = graph_of(small(), Precision.BF16)
    for name in (
        "d.conv1.weight", "d.conv1", "bf16.image", "bf16.conv1.weight", "infer.bf16.conv1.weight", "infer.conv1",
        "next.conv1.weight", "conv1.weight.momentum", "next.conv1.weight.momentum", "next.bn1.running_mean",
        "control", "next.control", "bn1.mean", "pool1.index",
    ):  # fmt: skip
        assert name in graph.values, name
    assert graph.infer_outputs == ("infer.head.bias_add",)
    assert graph.infer_inputs == ("image",)
    assert graph.metrics == ("loss1.1",)


def test_a_sum_of_contributions_has_the_plain_name() -> None:
    graph = graph_of(residual_two_losses(), Precision.FP32)
    sums = [op for op in graph.train if op.kind == "add" and op.outputs[0].startswith("d.")]
    assert sums
    assert all(".part" not in op.outputs[0] and not op.outputs[0].endswith("sum1") for op in sums)


def test_weights_are_cast_once_and_shared_between_uses() -> None:
    graph = graph_of(shared_layers(), Precision.BF16)
    assert sum(op.kind == "cast" and op.inputs == ("conv.weight",) for op in graph.train) == 1
    assert sum(op.kind == "cast" and op.inputs == ("left",) for op in graph.train) == 1


def test_statistics_of_a_shared_batch_norm_are_updated_one_after_the_other() -> None:
    graph = graph_of(shared_layers(), Precision.FP32)
    updates = [op for op in graph.train if op.kind == "update_running"]
    assert len(updates) == 2
    assert updates[1].inputs[:2] == updates[0].outputs
    assert dict(graph.updates)["bn.running_mean"] == updates[1].outputs[0]


def test_nothing_changes_a_state_before_the_guard() -> None:
    graph = graph_of(residual_two_losses(), Precision.FP16)
    guard = next(i for i, op in enumerate(graph.train) if op.kind == "guard")
    assert not any(KINDS[op.kind].updates for op in graph.train[:guard])
    assert all(KINDS[op.kind].updates for op in graph.train[guard:])
    gradients = {op.inputs[1] for op in graph.train if op.kind == "sgd_update"}
    assert set(graph.train[guard].inputs[2:]) == gradients


def test_the_control_block_starts_with_the_loss_scale() -> None:
    for precision, scale in ((Precision.FP16, INITIAL_LOSS_SCALE), (Precision.BF16, 1.0)):
        state = graph_of(small(), precision).states[-1]
        assert (state.value, state.initializer.kind, state.initializer.value) == ("control", "constant", scale)


def test_an_input_called_control_does_not_collide() -> None:
    w = Writer(2)
    x = w("dropout", w.input("control", 3))
    loss = w("mse", w("linear", x, features=2), w.input("wanted", 2))
    graph = graph_of(w.finish((), ((loss, 1.0),)), Precision.FP32)
    assert graph.values["control"].role is Role.INPUT
    assert [v.name for v in graph.values.values() if v.role is Role.CONTROL] == ["control.2"]


def test_a_skipped_step_changes_nothing() -> None:
    graph = graph_of(small(), Precision.FP32)
    start = draw(graph, np.random.default_rng(7))
    start["image"] = start["image"].copy()
    start["image"][0, 0, 0, 0] = np.nan
    env = step(graph, start)
    for state, after in graph.updates:
        if state != "control":
            assert np.array_equal(env[after], start[state]), state
    record = control_record(env["next.control"])
    assert (record["proceed"], record["skipped"], record["updates"]) == (0, 1, 0)


def test_a_dead_branch_is_dropped_and_max_pooling_of_the_image_needs_no_index() -> None:
    w = Writer(2)
    image = w.input("image", 1, 4, 4)
    w("bn", w("conv", image, path="dead", channels=2, kernel=1), path="dead_bn")
    y = w("conv", w("maxpool", image, path="pool", kernel=2), path="live", channels=1, kernel=1)
    loss = w("mse", w("flatten", y), w.input("wanted", 4))
    graph = graph_of(w.finish((), ((loss, 1.0),)), Precision.FP32)
    assert not any(op.name.startswith("dead") for op in (*graph.train, *graph.infer))
    assert "pool.index" not in graph.values
    assert graph.infer == ()
    assert "dead.weight" in graph.values, "a checkpoint still has it"


def test_an_output_without_a_loss_is_computed_and_has_no_gradient() -> None:
    w = Writer(2)
    x = w("linear", w.input("features", 3), path="body", features=4)
    side = w("linear", x, path="side", features=2)
    loss = w("mse", w("linear", x, path="main", features=1), w.input("wanted", 1))
    graph = graph_of(w.finish((side,), ((loss, 1.0),)), Precision.FP32)
    assert "side.weight" not in dict(graph.updates)
    assert graph.outputs == ("side.bias_add",)
    assert "d.side" not in graph.values


def test_adamw_has_two_states_a_parameter_and_plain_sgd_none() -> None:
    roles = [v.role for v in graph_of(small(), Precision.FP32, Optimizer("adamw")).values.values()]
    assert roles.count(Role.OPTIMIZER) == 2 * roles.count(Role.PARAMETER)
    roles = [v.role for v in graph_of(small(), Precision.FP32, Optimizer()).values.values()]
    assert roles.count(Role.OPTIMIZER) == 0


def test_values_with_rows_are_marked_even_where_channels_equal_the_batch() -> None:
    graph = graph_of(small(batch=4), Precision.FP32)  # 4 channels, 4 rows
    assert graph.values["d.conv1"].per_sample
    assert not graph.values["bn1.mean"].per_sample
    assert not graph.values["d.conv1.weight"].per_sample
    assert graph.values["target"].type.dtype is DType.INT32


def test_a_deep_network_is_differentiated_in_one_go() -> None:
    graph = graph_of(bottleneck_resnet((3, 8, 36, 3), batch=1, size=64), Precision.BF16)
    assert len(graph.train) > 2000


def test_mbc050_no_loss() -> None:
    w = Writer(2)
    y = w("linear", w.input("x", 3), features=1)
    with pytest.raises(MbcError, match="MBC050: network 'test' has no loss, so there is nothing to train") as error:
        differentiate(w.finish((y,), ()), MOMENTUM, Precision.FP32)
    assert "softmax_cross_entropy" in error.value.remedy


def test_mbc051_nothing_to_train() -> None:
    w = Writer(2)
    loss = w("mse", w.input("x", 3), w.input("y", 3))
    with pytest.raises(MbcError, match="MBC051: the loss of network 'test' depends on no parameter"):
        differentiate(w.finish((), ((loss, 1.0),)), MOMENTUM, Precision.FP32)


def test_mbc052_nesterov_without_momentum() -> None:
    with pytest.raises(MbcError, match="MBC052: nesterov needs momentum"):
        differentiate(small(), Optimizer(nesterov=True), Precision.FP32)


def test_mbc067_too_many_ranks_to_synchronise() -> None:
    network = synchronised(small())
    rows = (1,) * (MOST_RANKS + 1)
    with pytest.raises(MbcError, match=rf"error MBC067: .* over {MOST_RANKS + 1} GPUs, but at most {MOST_RANKS}"):
        differentiate(network, Optimizer(), Precision.FP32, Ranks(rows, tuple(range(len(rows)))))


def test_the_kernel_takes_as_many_ranks() -> None:
    source = (folder("templates") / "kernels" / "norm" / "sync_batch_norm.cu").read_text(encoding="utf-8")
    assert f"constexpr int MOST_RANKS = {MOST_RANKS};" in source
