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
