"""The text of a graph is complete, stable, and reads as it runs."""

from __future__ import annotations

from mbc.ir.graph import Optimizer
from mbc.ir.text import network_text, training_text
from mbc.ir.types import Precision
from mbc.passes.training_step import differentiate
from tests.ir.networks import small

NETWORK_TEXT = """\
network test, batch 4
  input image: fp32[4, 1, 8, 8]
  input target: int32[4]
  parameter conv1.weight: fp32[4, 1, 3, 3] = he(9 in, 36 out)
  parameter bn1.weight: fp32[4] = constant(1)
  parameter bn1.bias: fp32[4] = constant(0)
  statistic bn1.running_mean: fp32[4] = constant(0)
  statistic bn1.running_var: fp32[4] = constant(1)
  parameter head.weight: fp32[3, 64] = he(64 in, 3 out)
  parameter head.bias: fp32[3] = constant(0)
  conv1: fp32[4, 4, 8, 8] = convolution(image, conv1.weight; size (8, 8); kernel (3, 3); stride (1, 1); \
pad (1, 1, 1, 1); dilation (1, 1); groups 1)
  bn1: fp32[4, 4, 8, 8] = batch_norm(conv1, bn1.weight, bn1.bias, bn1.running_mean, bn1.running_var; \
eps 1e-05; momentum 0.1; affine true; \
sync false; frozen false; track true)
  relu1: fp32[4, 4, 8, 8] = relu(bn1)
  pool1: fp32[4, 4, 4, 4] = max_pool(relu1; size (8, 8); kernel (2, 2); stride (2, 2); pad (0, 0, 0, 0); \
ceil false; index false)
  head: fp32[4, 3] = linear(pool1, head.weight; sample_shape (4, 4, 4))
  head.bias_add: fp32[4, 3] = bias_add(head, head.bias)
  loss1: fp32[1], loss1.1: fp32[1] = softmax_cross_entropy(head.bias_add, target; smoothing 0)
  output head.bias_add
  loss 1 * loss1
"""


def test_text_of_a_network() -> None:
    assert network_text(small()) == NETWORK_TEXT


def test_text_of_a_training_graph() -> None:
    graph = differentiate(small(), Optimizer(momentum=0.9), Precision.BF16)
    text = training_text(graph)
    assert text == training_text(differentiate(small(), Optimizer(momentum=0.9), Precision.BF16))
    lines = text.splitlines()
    assert lines[0] == "training step of test, batch 4, bf16, sgd(momentum=0.9, nesterov=false, weight_decay=0)"
    assert "  control control: uint8[256] = constant(1)" in lines
    assert "  bf16.conv1.weight: bf16[4, 1, 3, 3] = cast(conv1.weight; to bf16)" in lines
    assert (
        "  d.pool1: bf16[4, 4, 4, 4] = linear_backward_data(d.head.bias_add, bf16.head.weight; "
        "sample_shape (4, 4, 4))  # head.backward_data" in lines
    )
    assert "  after the step conv1.weight = next.conv1.weight" in lines
    assert "inference of test, from image" in lines
    assert lines[-1] == "  output infer.head.bias_add"
    outputs = sum(len(op.outputs) for op in (*graph.train, *graph.infer))
    assert text.count("]") > outputs
