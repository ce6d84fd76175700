"""Groups of pointwise operations that follow from data flow: gates, chains, and that their plans are proved."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.ops.fused import names_of
from mbc.optimize.fusion.data_flow import Flow, data_flow_groups
from mbc.optimize.fusion.match_patterns import live_out, pattern_groups
from mbc.options import Options
from mbc.plan.model import Kernel, Plan, Program
from mbc.source import Source
from tests.graphs import training_graph

GATE = """
network gate(batch = 32, width = 32) {
  input image[batch, 3, 16, 16] : float
  input target[batch] : class
  x = image |> conv(width, 3, pad=1)
  y = image |> GATES
  z = (x, y |> softplus |> tanh) |> mul
  logits = z |> conv(width, 3, pad=1) |> global_avgpool |> linear(10)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd  precision = PRECISION }
"""
# The operand y: of the shape of x, one number for each pixel, for each channel, and for each row of each channel.
GATES = (
    "conv(width, 3, pad=1)",
    "conv(1, 3, pad=1)",
    "conv(width, 3, pad=1) |> avgpool(16)",
    "conv(width, 3, pad=1) |> mean((3,), keep=true)",
)
# Pointwise layers of one operand, and of two.
ONE = (
    "relu", "silu", "gelu", "sigmoid", "tanh", "mish", "hardswish", "relu6", "bn", "softplus", "clamp(min=-1.0)",
    "instance_norm", "leaky_relu(0.01)",
)  # fmt: skip
TWO = ("add", "mul", "sub", "maximum")


def planned(text: str) -> Plan:
    """Return the plan of a source, which the verifier has proved."""
    return compile_plan(Source("net.mbc", text), Options(gpu="h200"))


def launches_of(program: Program, *parts: str) -> list[tuple[str, ...]]:
    """Return the operations of the launches that run any operation whose name begins with one of these."""
    return [
        launch.operations for launch in program.launches
        if isinstance(launch.work, Kernel) and any(name.startswith(parts) for name in launch.operations)
    ]  # fmt: skip


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gate_is_one_launch_forward(precision: str, gates: str):
    text = GATE.replace("PRECISION", precision).replace("GATES", gates)
    plan = planned(text)
    assert launches_of(plan.infer, "infer.tanh") == [("infer.softplus0", "infer.tanh0", "infer.mul0")]


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gate_is_one_launch_backward(precision: str, gates: str):
    plan = planned(GATE.replace("PRECISION", precision).replace("GATES", gates))
    forward, backward = launches_of(plan.train, "softplus", "tanh", "mul")
    assert forward == ("softplus0", "tanh0", "mul0")
    assert len([name for name in backward if "backward" in name or name.startswith("mul0")]) == 4
    stored = {plan.buffers[access.buffer].value for launch in plan.train.launches for access in launch.accesses}
    assert stored.isdisjoint({"softplus0", "tanh0"}), "the backward launch recomputes what was not stored"


def test_a_gate_of_axes_apart_in_memory_keeps_the_groups_that_run():
    text = GATE.replace("image[batch, 3, 16, 16]", "image[batch, 3, 8, 8, 8]").replace("PRECISION", "fp32")
    plan = planned(text.replace("GATES", "conv(width, 3, pad=1) |> mean((2, 4), keep=true)"))
    assert launches_of(plan.train, "softplus", "tanh", "mul") == [
        ("softplus0", "tanh0", "mul0"),
        ("softplus0", "tanh0", "mul0.backward_broadcast"),
        ("mul0.backward_reduce_dot",),
        ("softplus0", "tanh0", "tanh0.backward", "softplus0.backward", "mean0.backward_expand"),
    ]


RESIDUAL = """
network residual(batch = 2) {
  input image[batch, 4, 16, 16, 16] : float
  input target[batch, 16, 16, 16] : class
  x = image |> conv(16, 3, pad=1) |> instance_norm |> leaky_relu(0.01)
  y = x |> conv(16, 3, pad=1) |> instance_norm |> leaky_relu(0.01) |> conv(16, 3, pad=1) |> instance_norm
  logits = y + x |> leaky_relu(0.01) |> conv(3, 1)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd  precision = PRECISION }
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_instance_norm_takes_the_sum_and_the_activation_after_it(precision: str):
    program = planned(RESIDUAL.replace("PRECISION", precision)).train
    launches = launches_of(program, "instance_norm", "leaky_relu")
    assert [names for names in launches if names[-1].startswith("leaky_relu") and "backward" not in names[-1]] == [
        ("instance_norm0", "leaky_relu0"),
        ("instance_norm1", "leaky_relu1"),
        ("instance_norm2", "add0", "leaky_relu2"),
    ]
    recomputed = ("instance_norm1", "leaky_relu1", "leaky_relu1.backward")
    passes = [(*recomputed, "instance_norm1.backward_reduce"), (*recomputed, "instance_norm1.backward")]
    assert [names for names in launches if "leaky_relu1.backward" in names] == passes, "only x and dy are read"


def chain(seed: int) -> str:
    """Return a network of pointwise layers, drawn by a seed, between convolutions."""
    rng = np.random.default_rng(seed)
    names, lines, unread = ["a", "b"], list[str](), ["a", "b"]
    for number in range(int(rng.integers(3, 12))):
        left, right = (str(name) for name in rng.choice(names, 2))
        one = rng.random() < 0.6
        layer = f"{left} |> {rng.choice(ONE)}" if one else f"({left}, {right}) |> {rng.choice(TWO)}"
        unread = [name for name in unread if name not in ((left,) if one else (left, right))] + [f"v{number}"]
        names.append(f"v{number}")
        lines.append(f"  v{number} = {layer}")
    return "\n".join(
        (
            "network chain(batch = 4) {",
            "  input image[batch, 3, 8, 8] : float",
            "  input target[batch] : class",
            "  a = image |> conv(8, 3, pad=1)",
            "  b = image |> conv(8, 3, pad=1)",
            *lines,
            f"  logits = ({', '.join((*unread, names[0]))}) |> add |> conv(4, 3, pad=1) |> global_avgpool |> linear(3)",
            "  output logits",
            "  loss (logits, target) |> softmax_cross_entropy",
            "}",
            "train { optimizer = sgd  precision = bf16 }",
        )
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_chain_has_a_proved_plan_and_few_groups(seed: int):
    text = chain(seed)
    steps = training_graph(text)
    for program in (steps.train, steps.infer):
        results = live_out(steps, program)
        proposed = data_flow_groups(Flow.of(steps, program, results), pattern_groups(program, results))
        assert len(proposed) <= 3 * len(program)
        for group in proposed:
            (launch,) = group.launches
            names = [operation.name for operation in program]
            last = names[group.positions[0]]
            assert set(names_of(launch)) >= group.replaces and last in group.replaces
    plan = planned(text)
    assert any(isinstance(launch.work, Kernel) and len(launch.operations) > 1 for launch in plan.train.launches)
