"""Bodies of networks, between HEAD and TAIL, that together have every operation of an ONNX export."""

from __future__ import annotations

from mbc.ops import POINTWISE
from mbc.ops.pointwise import Pointwise
from tests.ops.pointwise_inputs import examples, needs_positive

HEAD = "network net(batch = 3) {\n  input x[batch, 4, 8, 8] : float\n  input t[batch, 5] : float\n"
TAIL = "  p = x |> linear(5) @head\n  output p\n  loss (p, t) |> mse\n}\n"
BODIES = {
    "convolutions": """
      x = x |> conv(6, 3, pad=(1, 0, 1, 2), bias=true) |> bn |> relu |> conv(4, 3, groups=2, dilation=2)
      x = x |> conv_transpose(4, 3, stride=2, pad=1, output_pad=1, bias=true) |> bn(affine=false)""",
    "standardized": """
      x = x |> conv(6, 3, standardize=0.01, gain=1.5) |> conv(4, 3, groups=2, bias=true, standardize=0.01)""",
    "norms": "x = x |> group_norm(2) |> layer_norm |> instance_norm",
    "activations": "x = x |> leaky_relu(0.1) |> elu |> softplus |> prelu |> pow(2) |> softmax",
    "choices": """
      m = ((x, x |> tanh |> detach) |> compare(gt), x |> clamp(min=-0.5), x |> clamp(max=0.75) |> log_softmax) |> where
      s = parameter(shape=4, value=0.2) @bound
      x = ((m, s) |> maximum, (s, x) |> minimum |> hardtanh(-0.3, 0.3)) |> sub
      x = (x, (x |> indicator(ne, 0.1)) * (x |> indicator(le, 0.4))) |> masked_fill(-1.5)
      x = (x, s |> indicator(eq, 0.2)) |> masked_fill(0) |> selu |> threshold(0.1, 0.2)""",
    "pools": """
      x = x |> maxpool(3, stride=2, pad=1) |> avgpool(2, stride=1, pad=1, count_pad=false) |> adaptive_avgpool(3)
      x = x + (x |> global_avgpool) - (x |> global_maxpool) + (x |> adaptive_maxpool(1))
      x = x + x * x""",
    "arithmetic": """
      s = parameter(shape=4) @scale
      o = parameter(shape=(1, 8, 1)) @offset
      g = x |> global_avgpool |> sigmoid
      x = (2 - x * s) * g + o
      x = 1 / ((x |> abs) + 1.5) - x / 3""",
    "shapes": """
      a, b = x |> chunk(2, axis=1)
      x = (a, b) |> concat |> pixel_shuffle(2) |> pixel_unshuffle(2) |> channel_shuffle(2)
      x = x |> padding(1, mode=reflect) |> padding(2) |> padding(1, mode=replicate)
      x = x |> slice(axis=2, start=1, stop=9, step=2) |> permute(axes=(0, 2, 3, 1)) |> reshape(sizes=(8, 32))
      x = (x |> mean(axes=2), x |> sum(axes=2), x |> amax(axes=2)) |> stack(axis=2)
      x = (x, x |> permute(axes=(0, 2, 1))) |> matmul |> flatten""",
    "attention": """
      x = x |> conv(24, 1) |> reshape(sizes=(24, 1, 64)) |> attention(2) |> reshape(sizes=(8, 8, 8))
      q, k, v = (x |> conv(4, 1), x |> conv(4, 1), x |> conv(4, 1))
      x = (q, k, v) |> attention(2, causal=true, scale=0.7)""",
    "windows": """
      bias = window_bias(2, 4) @near
      shifted = window_bias(2, 4, size=8, shift=2) @shifted
      x = x |> windows(4) |> conv(12, 1)
      x = (x, bias) |> attention(2) |> join_windows(8, 4) |> roll(-2) |> windows(4) |> conv(12, 1)
      x = (x, shifted) |> attention(2) |> join_windows(8, 4) |> roll(2) |> roll(0)""",
    "resampling exactly": """
      x = x |> upsample(1.3, mode=nearest_exact) |> upsample(size=(7, 9), mode=bicubic)
      x = x |> upsample(1.6, mode=bilinear) |> upsample(size=(9, 6), mode=bilinear, align_corners=true)
    """,
    "padding around": """
      x = x |> padding((1, 2, 0, 3), mode=circular) |> padding(1, value=0.5)
    """,
    "resampling": "x = x |> upsample(2) |> upsample(size=(7, 9)) |> upsample(size=(11, 6), mode=bilinear)",
}


def _layer(function: Pointwise) -> str:
    """Return the layer of a declared function, with an input of its domain."""
    (a, *_) = examples(function)
    settings = ", ".join(f"{name}={getattr(a, name)}" for name in function.settings)
    return f"(x |> {'exp |> ' * needs_positive(function, a)}{function.name}({settings}))"


BODIES["functions"] = f"x = ({', '.join(_layer(f) for f in POINTWISE.values() if f.layers)}) |> concat"
