"""Networks to time, small enough for the interpreter."""

from __future__ import annotations

from pathlib import Path

from mbc.bench.contender_messages import Job
from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.plan.file import dump_plan
from mbc.source import Source
from tests.runtime.nets import MOBILE, SMALL

# Every operation that SMALL lacks.
MIXED = """
network mixed(batch = 4, classes = 5) {
  input image[batch, 3, 12, 12] : float
  input target[batch] : class
  x = image |> conv(8, 3, pad=1) |> lrn(5) |> gelu |> maxpool(3, stride=2, ceil=true)
  x = x |> conv(8, 3, pad=1, groups=2, bias=true) |> silu |> avgpool(3, stride=2, pad=1)
  y = x |> conv_transpose(8, 2, stride=2) |> upsample(2) |> leaky_relu |> conv(8, 3, stride=2, pad=1) |> sigmoid
  z = (y * y |> tanh |> relu6 |> elu) + 0.5 * (y |> hardswish |> mish) * (y |> hardsigmoid |> softplus)
  logits = (z, x |> upsample(2)) |> concat |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy(smoothing=0.1)
  loss 0.5 * ((logits, target) |> dice)
}
train { optimizer = adamw(weight_decay=0.01) }
"""
# Its gradients are wrong where logits are taken in another order than [rows, classes, height, width].
DENSE = """
network dense(batch = 4) {
  input image[batch, 3, 8, 8] : float
  input target[batch, 8, 8] : class
  input wanted[batch, 6, 8, 8] : float
  x = image |> conv(6, 3, pad=1) |> bn(affine=false) |> relu
  output x
  loss ((x, target) |> softmax_cross_entropy) + 0.3 * ((x, wanted) |> mse) + ((x, target) |> dice(ignore_index=1))
}
train { optimizer = sgd(momentum=0.9, nesterov=true, weight_decay=0.01) }
"""
# Parameters with a rate and a weight decay of their own.
GROUPED = (
    MIXED.replace("mixed", "grouped")
    .replace("linear(classes)", "linear(classes) @head")
    .replace(
        "adamw(weight_decay=0.01)",
        """adamw(weight_decay=0.5)
  no_decay = norm_and_bias
  groups = (group("head.*", rate=3), group("head.bias", weight_decay=0.2))""",
    )
)
SOURCES = {"small": SMALL, "mixed": MIXED, "dense": DENSE, "mobile": MOBILE, "grouped": GROUPED}


def job(
    folder: Path, name: str = "small", precision: str = "fp32", settings: tuple[tuple[str, str], ...] = (),
    gpus: int = 1,
) -> Job:  # fmt: skip
    source, settings = Source(f"{name}.mbc", SOURCES[name]), (("train.precision", precision), *settings)
    file = folder / "plan.json"
    file.write_text(dump_plan(compile_plan(source, Options(gpu="h200", settings=settings, gpus=gpus))))
    return Job(source, settings, None, str(file), "cpu", learning_rate=0.02, blocks=2, block_s=0.0)
