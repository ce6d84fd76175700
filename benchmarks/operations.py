"""Small networks, one for every operation and its unusual settings, to compare gradients on identical inputs.

Each network has a convolution before the operation, so that the gradient of its data is computed too, and a linear
layer and a loss after it. `source` writes one network of any number of cases. They share images and target but no
parameters, so that each case has its own gradients, and one package holds all cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

import numpy as np

from mbc.ops import LAYERS, POINTWISE
from mbc.ops.pointwise import Pointwise


def is_gentle(function: Pointwise) -> bool:
    """Return whether a function is finite everywhere and grows no faster than its argument."""
    if any(field.default is MISSING for field in fields(function.attributes)):
        return False
    x = np.array([-100.0, -1.0, 0.0, 1.0, 100.0])
    with np.errstate(all="ignore"):
        y = function.forward(function.attributes(), x)
    return bool((abs(y) <= 1 + abs(x)).all())


# Functions of one tensor that grow no faster than the tensor, and need no settings.
ACTIVATIONS = tuple(
    name
    for name, function in POINTWISE.items()
    if all(parameter.default is not None for parameter in LAYERS[name].parameters) and is_gentle(function)
)
ENTROPY = "(logits, target) |> softmax_cross_entropy"


@dataclass(frozen=True)
class Case:
    """One operation. `body` computes y from x; `channels` and `size` are those of x.

    `losses` may use y, logits and target.
    """

    name: str
    body: str
    channels: int = 8
    size: int = 12
    losses: tuple[str, ...] = (ENTROPY,)

    @property
    def chooses(self) -> bool:
        """True if rounding may change a choice: the side of zero of a ReLU, or the place of a maximum."""
        return any(choice in self.body for choice in ("relu", "maxpool", "amax"))

    @property
    def block(self) -> str:
        """Name of the case's block."""
        return f"""block {self.name}_case(channels) on image {{
  x = image |> conv(channels, 3, pad=1, bias={"false" if self.name.startswith("bn") else "true"}) @before
  {self.body}
  return y
}}"""

    @property
    def statements(self) -> str:
        """Statements of the case in the language."""
        lines = [
            f"  y = image{self.size} |> {self.name}_case({self.channels}) @{self.name}",
            f"  logits = y |> flatten |> linear(5) @{self.name}_logits",
        ]
        return "\n".join([*lines, *(f"  loss {loss.format(name=self.name)}" for loss in self.losses)])


def source(name: str, cases: Sequence[Case]) -> str:
    """Return one network of all these cases. The parameters of a case are called `<case>.…` or `<case>_….…`."""
    sizes = sorted({case.size for case in cases})
    blocks = "\n\n".join(case.block for case in cases)
    images = "\n".join(f"  input image{size}[batch, 3, {size}, {size}] : float" for size in sizes)
    statements = "\n".join(case.statements for case in cases)
    return f"""{blocks}

network {name}(batch = 8) {{
{images}
  input target[batch] : class
{statements}
  output logits
}}
train {{ optimizer = sgd(momentum=0.9) }}
"""


def case_of(parameter: str) -> str:
    """Return the case to which a parameter or statistic of `source` belongs."""
    first = parameter.split(".")[0]
    return max((c.name for c in CASES if first == c.name or first.startswith(c.name + "_")), key=len)


CASES = (
    Case("conv_plain", "y = x |> conv(12, 3, pad=1)"),
    Case("conv_bias", "y = x |> conv(12, 3, pad=1, bias=true)"),
    Case("conv_stride", "y = x |> conv(12, 3, stride=2, pad=1)", size=13),
    Case("conv_asymmetric", "y = x |> conv(12, 3, stride=2, pad=(0, 1, 0, 1))"),
    Case("conv_rectangular", "y = x |> conv(12, (1, 7), pad=(0, 3))"),
    Case("conv_dilated", "y = x |> conv(12, 3, pad=2, dilation=2)"),
    Case("conv_grouped", "y = x |> conv(12, 3, pad=1, groups=4)"),
    Case("conv_depthwise", "y = x |> conv(8, 3, pad=1, groups=8)"),
    Case("conv_pointwise", "y = x |> conv(32, 1)"),
    Case("conv_large", "y = x |> conv(16, 11, stride=4, pad=2)", size=27),
    Case("conv_transpose", "y = x |> conv_transpose(6, 2, stride=2)"),
    Case("conv_transpose_pad", "y = x |> conv_transpose(6, 3, stride=2, pad=1)"),
    Case("upsample", "y = x |> upsample(2)"),
    Case("upsample_bilinear", "y = x |> upsample(2, mode=bilinear)"),
    Case("upsample_size", "y = x |> upsample(size=(17, 9))"),
    Case("linear", "y = x |> flatten |> linear(16) |> relu |> linear(16)"),
    Case("bn", "y = x |> bn"),
    Case("bn_plain", "y = x |> bn(affine=false)"),
    Case("bn_eps", "y = x |> bn(eps=0.01, momentum=0.3)"),
    Case("group_norm", "y = x |> group_norm(4)"),
    Case("layer_norm", "y = x |> layer_norm"),
    Case("lrn", "y = x |> lrn"),
    Case("lrn_wide", "y = x |> lrn(size=4, alpha=0.1, beta=0.5, k=2)"),
    *(Case(name, f"y = x |> {name}") for name in ACTIVATIONS),
    Case("maxpool", "y = x |> maxpool(2, stride=2)"),
    Case("maxpool_pad", "y = x |> maxpool(3, stride=2, pad=1)"),
    Case("maxpool_ceil", "y = x |> maxpool(3, stride=2, ceil=true)", size=13),
    Case("avgpool", "y = x |> avgpool(2, stride=2)"),
    Case("avgpool_pad", "y = x |> avgpool(3, stride=2, pad=1)"),
    Case("global_avgpool", "y = x |> global_avgpool"),
    Case("adaptive_avgpool", "y = x |> adaptive_avgpool((5, 7))"),
    Case("adaptive_maxpool", "y = x |> adaptive_maxpool((5, 7))"),
    Case("global_maxpool", "y = x |> global_maxpool"),
    Case("add", "y = x + (x |> conv(8, 3, pad=1))"),
    Case("mul", "y = x * (x |> conv(8, 3, pad=1))"),
    Case("broadcast_mul", "y = x * (x |> global_avgpool |> conv(8, 1))"),
    Case("broadcast_add", "y = x + (x |> global_avgpool |> linear(8))"),
    Case("broadcast", "y = x * parameter(8, value=0.5) @gamma + parameter((1, 8, 12, 12), std=0.02) @position"),
    Case("sub", "y = x - (x |> mean((2, 3), keep=true))"),
    Case("div", "y = x / ((x * x |> sum(1, keep=true)) + 1)"),
    Case("permute", "y = x |> permute((0, 2, 3, 1)) |> relu |> permute((0, 3, 1, 2)) |> reshape((16, 6, 12))"),
    Case("shuffle", "y = x |> channel_shuffle(2) |> pixel_shuffle(2) |> pixel_unshuffle(2)"),
    Case("split", "a, b = x |> chunk(2)\n  c, d = b |> split((1, 3))\n  y = (c, a |> tanh, d) |> concat"),
    Case("unused_part", "a, b, c = x |> split((2, 4, 2))\n  y = (c, a |> tanh) |> concat"),
    Case("slice", "y = x |> slice(2, 1, -1, 2) |> slice(3, step=3)"),
    Case("stack", "y = (x, x |> tanh) |> stack(2) |> reshape((16, 12, 12))"),
    Case("padding_zero", "y = x |> padding((1, 2, 0, 3))"),
    Case("padding_reflect", "y = x |> padding((1, 2, 0, 3), mode=reflect)"),
    Case("padding_replicate", "y = x |> padding(2, mode=replicate)"),
    Case("elementary", "y = (x * x + 1 |> sqrt) + (x |> tanh |> exp) - (x * x + 1 |> log) + (x + 5 |> abs)"),
    Case("clamp", "y = (x |> clamp(min=-0.5, max=0.75)) + (x |> hardtanh(-0.3, 0.3)) + (x |> clamp(max=0.25))"),
    Case("maximum", "y = ((x, x * x) |> maximum) + ((x, parameter(8, value=0.1) @gamma) |> minimum)"),
    Case("where", "y = (x |> indicator(gt, 0.1), x * x, (x, (x * x, x) |> compare(lt)) |> masked_fill(0.5)) |> where"),
    Case("shrink", "y = (x |> softshrink) + (x |> hardshrink) + (x |> threshold(0.1, 0.2)) + (x |> selu |> celu(0.5))"),
    Case("detach", "y = x * (x |> sigmoid |> detach)"),
    Case("log_softmax", "y = x |> log_softmax |> glu"),
    Case("pow", "y = (x * x + 1) ** 1.5 / 2 + 1 / (x ** 2 + 1)"),
    Case("prelu", "y = x |> prelu(channels=true) |> tanh |> prelu"),
    Case("instance_norm", "y = x |> instance_norm"),
    Case("softmax", "y = (x |> softmax) + (x |> softmax(-1))"),
    Case("amax", "y = x - (x |> amax(1, keep=true))"),
    Case(
        "matmul",
        "a = x |> reshape((2, 4, 144))\n  b = (a, a |> tanh) |> matmul(transpose_b=true)\n"
        "  y = (b |> softmax(-1), a) |> matmul",
    ),
    Case("attention", "y = x |> conv(24, 1) |> reshape((24, 1, 144)) |> attention(2) |> reshape((8, 12, 12))"),
    Case(
        "attention_bias",
        "a = x |> reshape((8, 4, 36))\n  y = (a, a |> tanh, a, parameter((1, 1, 4, 36, 36), std=0.1)) "
        "|> attention(1, causal=true)",
    ),
    Case(
        "window_attention",
        "a = x |> conv(24, 1) |> roll((-2, -2)) |> windows(4)\n"
        "  b = (a, window_bias(2, 4, 12, 2)) |> attention(2) |> join_windows(12, 4)\n  y = b |> roll(2)",
    ),
    Case(
        "standardized",
        "y = x |> conv(8, 3, pad=1, standardize=1e-3, gain=1.7) |> conv(8, 3, groups=2, standardize=1e-3)",
    ),
    Case("concat", "y = (x, x |> conv(3, 3, pad=1), x |> relu) |> concat"),
    Case("scale", "y = 0.5 * x"),
    Case("dropout", "y = x |> dropout(0.3)"),
    Case("drop_path", "y = x + (x |> conv(8, 3, pad=1) |> drop_path(0.3))"),
    Case("fan_out", "a = x |> relu\n  y = a + (a |> conv(8, 3, pad=1)) + (a |> sigmoid)"),
    Case("shared", "f = conv(8, 3, pad=1)\n  y = x |> f |> relu |> f"),
    Case("smoothing", "y = x |> relu", losses=(ENTROPY + "(smoothing=0.1)",)),
    Case(
        "soft_target", "y = x |> relu", losses=("(logits, 0 * logits + 0.2) |> softmax_cross_entropy(smoothing=0.1)",)
    ),
    Case("kl_divergence", "y = x |> relu", losses=("(logits, 0 * logits + 0.2) |> kl_divergence",)),
    Case(
        "class_weights",
        "y = x |> relu",
        losses=(ENTROPY + "(smoothing=0.1, ignore_index=2, class_weights=(1, 0.5, 2, 1, 3))",),
    ),
    Case("dice", "y = x |> relu", losses=("(logits, target) |> dice(ignore_index=2)",)),
    Case(
        "mse",
        "y = x |> tanh",
        losses=(ENTROPY, "0.3 * ((logits, y |> global_avgpool |> linear(5) @{name}_mse) |> mse)"),
    ),
    Case(
        "l1", "y = x |> tanh", losses=(ENTROPY, "0.3 * ((logits, y |> global_avgpool |> linear(5) @{name}_l1) |> l1)")
    ),
    Case(
        "smooth_l1",
        "y = x |> tanh",
        losses=(ENTROPY, "0.3 * ((logits, y |> global_avgpool |> linear(5) @{name}_l1) |> smooth_l1(0.5))"),
    ),
    Case(
        "binary_cross_entropy",
        "y = x |> tanh",
        losses=("(logits, 0 * logits + 0.3) |> binary_cross_entropy(pos_weight=2)",),
    ),
    Case(
        "two_losses",
        "y = x |> silu",
        losses=(
            f"0.7 * ({ENTROPY}) + 0.3 * ((y |> flatten |> linear(7) @{{name}}_other, target) |> softmax_cross_entropy)",
        ),
    ),
)
