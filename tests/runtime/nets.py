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
from tests.graphs import network_source

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

MOBILE, SHAPES, ATTENTION, VOLUME, SIGNAL = map(network_source, ("mobile", "shapes", "attention", "volume", "signal"))


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
