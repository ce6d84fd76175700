"""Dice with cross entropy in a plan: no buffer holds probabilities, and one operation computes the whole gradient."""

from __future__ import annotations

from mbc.compiler import compile_plan
from mbc.ir.types import DType
from mbc.options import Options
from mbc.plan.verify import verify_plan
from mbc.source import Source

SHAPE = (2, 16, 16, 16, 16)  # of the logits
VOLUMES = """network volumes(batch = 2, classes = 16) {
  input image[batch, 1, 16, 16, 16] : float
  input target[batch, 16, 16, 16] : class
  x = image |> conv(32, 3, pad=1) |> instance_norm |> leaky_relu
  full = x |> conv(classes, 1)
  half = x |> conv(classes, 3, stride=2, pad=1)
  output full
  loss 2 / 3 * ((full, target) |> dice(background=false, batch=true, cross_entropy=1))
  loss 1 / 3 * ((half, target) |> dice(background=false, batch=true, cross_entropy=1))
}
train { precision = bf16 }
"""


def test_no_buffer_holds_probabilities_in_fp32() -> None:
    plan = compile_plan(Source("volumes.mbc", VOLUMES), Options(gpu="h200"))
    verify_plan(plan)
    types = {name: value.type for name, value in plan.graph.values.items()}
    of_logits = {b.value: b.dtype for b in plan.buffers if b.value in types and types[b.value].shape == SHAPE}
    full = next(op.inputs[0] for op in plan.graph.train if op.kind == "dice_sums")
    assert {name: dtype for name, dtype in of_logits.items() if not name.startswith("infer.")} == {
        full: DType.BF16,
        f"d.{full}": DType.BF16,
    }
