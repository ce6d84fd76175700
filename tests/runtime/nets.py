"""Small networks for the tests of the runtime, planned by the compiler itself."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.plan.file import dump_plan
from mbc.plan.model import Plan
from mbc.source import Source

SMALL = """
network small(batch = 6, classes = 5) {
  input image[batch, 2, 6, 6] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1) @first |> bn |> relu |> maxpool(2) |> dropout(0.2)
  y = x |> conv(4, 3, pad=1, bias=true) @second |> relu
  logits = x + y |> flatten |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9, weight_decay=1e-3) }
"""


# Squeeze-excitation and hard activations as MobileNetV3 has them, other normalisations, and resizing.
MOBILE = """
block excite(reduced) on x {
  gate = x |> global_avgpool |> conv(reduced, 1, bias=true) |> relu |> conv(x.shape[1], 1, bias=true) |> hardsigmoid
  return x * gate
}

block inverted(expanded, channels) on x {
  y = x |> conv(expanded, 1) |> bn |> hardswish |> conv(expanded, 3, pad=1, groups=expanded) |> bn |> hardswish
  return x + (y |> excite(4) |> conv(channels, 1) |> bn |> drop_path(0.2))
}

network mobile(batch = 8) {
  input image[batch, 3, 8, 8] : float
  input target[batch] : class
  x = image |> conv(8, 3, stride=2, pad=1) |> bn |> hardswish |> inverted(16, 8)
  x = x |> layer_norm(1e-6) |> upsample(size=(6, 5), mode=bilinear) |> group_norm(2)
  # Of a linear layer the gate is [N, C].
  x = (x |> global_avgpool |> linear(8) |> sigmoid) * x
  logits = x - (x |> global_avgpool) |> relu6 |> flatten |> linear(5)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""

# Free parameters, channel shuffles, permutations, padding, attention, adaptive pools, elementary functions.
SHAPES = """
block layer_scaled(channels) on x {
  y = x |> padding(1, mode=reflect) |> conv(channels, 3, groups=channels, bias=true) |> layer_norm
  y = y |> conv(4 * channels, 1) |> gelu_tanh |> conv(channels, 1)
  return x + y * parameter(channels, value=0.1) @gamma
}

block shuffled(channels) on x {
  kept, y = x |> chunk(2)
  return (kept, y |> conv(channels // 2, 3, pad=1) |> bn |> prelu(channels=true)) |> concat |> channel_shuffle(2)
}

block attended(heads) on x {
  c, h, w = (x.shape[1], x.shape[2], x.shape[3])
  q, k, v = x |> conv(3 * c, 1) |> reshape((3 * heads, c // heads, h * w)) |> chunk(3)
  mixed = (v, (q, k) |> matmul(transpose_a=true) |> softmax(-1)) |> matmul(transpose_b=true)
  return x + (mixed |> reshape((c, h, w)))
}

network shapes(batch = 8) {
  input image[batch, 3, 12, 12] : float
  input target[batch] : class
  x = image |> padding((1, 0, 0, 1)) |> conv(16, 3, stride=2, pad=1) |> bn
  x = x + parameter((1, 16, 7, 7), std=0.02) @position |> layer_scaled(16) |> shuffled(16) |> attended(2)
  x = x / ((x ** 2 |> mean(1, keep=true)) + 0.001 |> sqrt)
  x = x |> pixel_shuffle(2) |> permute((0, 2, 3, 1)) |> tanh |> permute((0, 3, 1, 2)) |> slice(2, 1, -1, 2)
  y = (x |> adaptive_avgpool((4, 5)), x |> adaptive_maxpool((4, 5))) |> stack |> reshape((8, 4, 5))
  top = x |> global_maxpool |> flatten
  logits = (y - (y |> amax((2, 3), keep=true)) |> flatten, top) |> concat |> linear(5)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""

# A sequence with a token of its own, as ViT; and windows that are shifted, as Swin.
ATTENTION = """
block feed_forward(channels) on x {
  return x + (x |> layer_norm |> conv(channels, 1, bias=true) |> gelu |> conv(x.shape[1], 1, bias=true))
}
block of_sequence(heads) on x {
  y = x |> layer_norm |> conv(3 * x.shape[1], 1, bias=true) |> attention(heads) |> conv(x.shape[1], 1, bias=true)
  return x + y |> feed_forward(32)
}
block of_windows(heads, shift) on x {
  qkv = x |> layer_norm |> roll(-shift) |> windows(4) |> conv(3 * x.shape[1], 1, bias=true)
  y = (qkv, window_bias(heads, 4, size=8, shift=shift) @bias) |> attention(heads) |> conv(x.shape[1], 1, bias=true)
  return x + (y |> join_windows(8, 4) |> roll(shift)) |> feed_forward(32)
}
network attention(batch = 8) {
  input image[batch, 3, 16, 16] : float
  input target[batch] : class
  x = image |> conv(16, 2, stride=2) @patches
  x = x |> of_windows(2, 0) |> of_windows(2, 2)
  x = x |> conv(24, 2, stride=2) @merge |> windows(4) |> padding((0, 0, 1, 0))
  x = x + parameter((1, 24, 1, 17), std=0.02) @position |> of_sequence(2) |> of_sequence(3) |> layer_norm
  logits = x |> slice(axis=3, stop=1) |> flatten |> linear(5)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = adamw(weight_decay=0.01) }
"""

# A small U-Net, whose first and last axes differ.
VOLUME = """
block two(channels) on x {
  y = x |> conv(channels, (1, 3, 3), pad=(0, 1, 1)) |> instance_norm |> leaky_relu(0.01)
  return y |> conv(channels, 3, pad=(0, 2, 1, 1, 1, 1)) |> group_norm(2) |> relu
}
network volume(batch = 4, classes = 3) {
  input image[batch, 1, 8, 12, 12] : float
  input target[batch, 8, 12, 12] : class
  a = image |> two(8)
  b = a |> conv(16, 3, stride=(2, 2, 1), pad=1, groups=2) |> bn |> relu |> two(16)
  c = b |> maxpool(3, stride=2, pad=2, dilation=2) |> conv(16, 1)
        |> upsample(size=(4, 6, 12), mode=linear, align_corners=true)
  d = b |> avgpool((1, 2, 2)) |> adaptive_maxpool((3, 2, 5)) |> upsample((1, 3, 1)) |> adaptive_avgpool((4, 6, 12))
  u = (b, c, d, b + (b |> global_avgpool)) |> concat |> conv_transpose(8, (2, 2, 1), stride=(2, 2, 1))
  v = u |> padding(1, mode=circular) |> padding(1, value=-inf) |> maxpool(3, stride=2) |> upsample(1.7)
  w = v |> upsample(size=(8, 12, 12), mode=nearest_exact)
  y = (a, u, w) |> concat |> two(8) |> dropout(0.1) |> conv(classes, 1, bias=true)
  output y
  loss (y, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""

SIGNAL = """
network signal(batch = 8, classes = 4) {
  input image[batch, 2, 96] : float
  input target[batch, 96] : class
  a = image |> conv(8, 5, pad=(4, 0)) |> bn |> relu
  b = a |> maxpool(3, stride=2, pad=1) |> conv(16, 3, pad=2, dilation=2, groups=2) |> group_norm(4) |> silu
  c = b |> avgpool(2) |> upsample(2.02, mode=linear) |> conv_transpose(8, 4, stride=2, pad=1) |> relu
  d = a |> adaptive_avgpool(7) |> upsample(size=96) |> lrn(3)
  y = (a, c, d) |> concat |> conv(classes, 1, bias=true)
  output y
  loss (y, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""


@functools.cache
def small_plan(
    precision: str = "fp32", micro_batch: int = 0, optimizer: str = "sgd(momentum=0.9)", serial: bool = False
) -> Plan:
    """Return the plan of a small network. With `serial`, kernels run one after another, whatever their times."""
    without = frozenset({"concurrent_stream"} if serial else ())
    source = SMALL.replace("sgd(momentum=0.9, weight_decay=1e-3)", optimizer)
    options = Options(gpu="h200", settings=(("train.precision", precision),), micro_batch=micro_batch, without=without)
    return compile_plan(Source("small.mbc", source), options)


SAME_SHAPE = """network same_shape(batch = 6) {
  input x[batch, 5] : float
  input t[batch, 5] : float
  y = x |> linear(5)
  output y
  loss (y, t) |> mse
}"""


@functools.cache
def same_shape_plan() -> Plan:
    """Return the plan of a network whose output has the shape of its input."""
    return compile_plan(Source("same_shape.mbc", SAME_SHAPE), Options(gpu="h200"))


def package(folder: Path, plan: Plan) -> Path:
    """Return a folder that looks like a package built for a GPU."""
    (folder / "plan.json").write_text(dump_plan(plan))
    (folder / "libmodule.so").touch()
    return folder


def batch(seed: int = 0, rows: int = 6) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    target = random.integers(0, 5, rows)
    image = random.standard_normal((rows, 2, 6, 6)).astype(np.float32) + target[:, None, None, None] / 4
    return image.astype(np.float32), target
