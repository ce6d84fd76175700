"""Operations that no single layer computes: outputs, loss, gradients and statistics in fp64, beside PyTorch's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
torch = pytest.importorskip("torch", reason="what is imported is made by PyTorch, which is not installed")
from exactness import judge, stirred  # noqa: E402

nn, F = torch.nn, torch.nn.functional
Tensor = Any


class Behind(nn.Module):
    """A model that applies a function, with the modules that it calls, to the output of a convolution."""

    def __init__(self, function: Callable[..., Tensor], held: tuple[Any, ...], shape: tuple[int, ...]) -> None:
        super().__init__()
        kind = nn.Conv2d if len(shape) == 4 else nn.Conv1d
        self.first = kind(shape[1], 6, 3, padding=1)
        self.held = nn.ModuleList(held)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x), *self.held)


def _without(module: Any, name: str) -> Any:
    """Return a module without one of its parameters."""
    module.register_parameter(name, None)
    return module


IMAGE, LINE = (2, 3, 7, 5), (3, 4, 9)
CASES: dict[str, tuple[tuple[int, ...], Callable[..., Tensor], tuple[Any, ...]]] = {
    "layer norm of the last two": (IMAGE, lambda x, m: m(x), (nn.LayerNorm((7, 5)),)),
    "layer norm of all": (IMAGE, lambda x, m: m(x), (nn.LayerNorm((6, 7, 5), eps=1e-3),)),
    "layer norm without offset": (IMAGE, lambda x, m: m(x), (nn.LayerNorm(5, bias=False),)),
    "layer norm without scale": (IMAGE, lambda x, m: m(x), (nn.LayerNorm(5, elementwise_affine=False),)),
    "layer norm of channels without scale": (
        IMAGE, lambda x, m: m(x.permute(0, 2, 3, 1)), (nn.LayerNorm(6, elementwise_affine=False),),
    ),
    "layer norm of a row": (IMAGE, lambda x, m: m(x.mean((2, 3))), (nn.LayerNorm(6, bias=False),)),
    "rms norm": (IMAGE, lambda x, m: m(x), (nn.RMSNorm((7, 5), eps=1e-3),)),
    "rms norm without scale": (IMAGE, lambda x, m: m(x), (nn.RMSNorm(5, eps=0.01, elementwise_affine=False),)),
    "group norm without scale": (IMAGE, lambda x, m: m(x), (nn.GroupNorm(3, 6, affine=False),)),
    "group norm of a line": (LINE, lambda x, m: m(x), (nn.GroupNorm(2, 6, affine=False, eps=0.01),)),
    "instance norm without scale": (IMAGE, lambda x, m: m(x), (nn.InstanceNorm2d(6),)),
    "instance norm of a line": (LINE, lambda x, m: m(x), (nn.InstanceNorm1d(6),)),
    "variance": (IMAGE, lambda x: x.var((1, 3)), ()), "variance kept": (IMAGE, lambda x: x.var(2, keepdim=True), ()),
    "deviation": (IMAGE, lambda x: x.std(2, correction=0), ()), "deviation kept": (LINE, lambda x: x.std(-1, True), ()),
    "maximum": (IMAGE, lambda x: x.max(2)[0], ()), "maximum kept": (IMAGE, lambda x: x.max(1, keepdim=True)[0], ()),
    "maximum of equals": (IMAGE, lambda x: torch.cat((x.tanh(), F.relu(x).tanh() * 0 + 1), 3).max(3)[0], ()),
    "minimum": (IMAGE, lambda x: x.min(-1)[0], ()), "least": (LINE, lambda x: x.amin(2, keepdim=True), ()),
    "logsumexp": (IMAGE, lambda x: x.logsumexp((1, 2)), ()),
    "logsumexp kept": (LINE, lambda x: (9 * x).logsumexp(1, keepdim=True), ()),
    "max pool of a line": (LINE, lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True), ()),
    "average pool of a line": (LINE, lambda x: F.avg_pool1d(x, 2, padding=1, count_include_pad=False), ()),
    "adaptive pools of a line": (
        LINE, lambda x: F.adaptive_avg_pool1d(x, 4) + F.adaptive_max_pool1d(x, 4), (),
    ),
    "average pool with a divisor": (IMAGE, lambda x: F.avg_pool2d(x, (2, 3), padding=1, divisor_override=5), ()),
    "pools of lines without channels": (
        LINE,
        lambda x: F.avg_pool1d(x.mean(1), 2) + F.max_pool1d(x.mean(1), 2) + F.adaptive_max_pool1d(x.amax(1), 4)
        + F.adaptive_avg_pool1d(x.mean(1), 4),
        (),
    ),
    "pools of images without channels": (
        IMAGE,
        lambda x: F.avg_pool2d(x.mean(1), (2, 1), divisor_override=3) + F.max_pool2d(x.amax(1), (2, 1))
        + F.adaptive_avg_pool2d(x.mean(1), (3, 5)) + F.adaptive_max_pool2d(x.mean(1), 1),
        (),
    ),
    "adaptive pools to the same size": (
        IMAGE, lambda x: F.adaptive_avg_pool2d(x.mean(1), (7, 5)) + F.adaptive_max_pool2d(x.amax(1), (7, 5)), (),
    ),
    "convolution of a line of the same length": (
        LINE, lambda x, m, n: m(x) + n(x), (nn.Conv1d(6, 4, 4, padding="same", dilation=2, groups=2),
        nn.Conv1d(6, 4, 1, padding="valid", bias=False)),
    ),
    "batch norm without offset": (IMAGE, lambda x, m: m(x), (_without(nn.BatchNorm2d(6), "bias"),)),
    "batch norm without scale": (LINE, lambda x, m: m(x), (_without(nn.BatchNorm1d(6), "weight"),)),
    "batch norm of rows without offset": (
        LINE, lambda x, m: m(x.mean(2)), (_without(nn.BatchNorm1d(6), "bias"),),
    ),
    "nearest of a line": (LINE, lambda x: F.interpolate(x, scale_factor=2), ()),
    "linear of a line": (LINE, lambda x: F.interpolate(x, size=14, mode="linear"), ()),
    "transposed convolution of a line": (
        LINE, lambda x, m: m(x), (nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2),),
    ),
    "linear over the last": (IMAGE, lambda x, m: m(x), (nn.Linear(5, 4),)),
    "linear over the last of a line": (LINE, lambda x, m: m(x).tanh(), (nn.Linear(9, 4, bias=False),)),
    "linear over the last of five": (
        IMAGE, lambda x, m: m(x.unflatten(1, (2, 3))).transpose(1, -1), (nn.Linear(5, 4),),
    ),
    "padding by a number": (IMAGE, lambda x: F.pad(x, (1, 2, 0, -1), value=0.75), ()),
    "padding of channels": (IMAGE, lambda x: F.pad(x, (0, 0, 1, 0, 2, 1)), ()),
    "padding of channels by a number": (IMAGE, lambda x: F.pad(x, (0, -1, 1, 0, 2, 1), value=-2.0), ()),
    "padding of a line": (LINE, lambda x: F.pad(x, (2, 1)), ()),
    "reflected line": (LINE, lambda x: F.pad(x, (2, 1), mode="reflect"), ()),
    "circular": (IMAGE, lambda x: F.pad(x, (2, 1, 0, 3), mode="circular"), ()),
    "circular convolution": (IMAGE, lambda x, m: m(x), (nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"),)),
    "repeated": (IMAGE, lambda x: x.repeat(1, 2, 1, 3), ()),
    "repeated elements": (LINE, lambda x: x.repeat_interleave(2, 1), ()),
    "one number a sample": (LINE, lambda x, m: 1.5 - m.weight * x.mean((1, 2)), (nn.PReLU(),)),
    "prelu of one number a sample": (LINE, lambda x, m: m(x.mean((1, 2))), (nn.PReLU(),)),
    "narrow": (IMAGE, lambda x: x.narrow(1, 2, 3) * x.narrow(-3, -3, 3), ()),
    "write with a step": (IMAGE, lambda x: _with_step(x), ()),
}  # fmt: skip


def _with_step(x: Tensor) -> Tensor:
    y = x * 1.5
    y[:, 1::2].mul_(0.5)
    y[..., ::3] = x[..., :2].tanh()
    return y


@pytest.mark.parametrize("name", CASES)
def test_a_composed_operation_equals_torch(name: str) -> None:
    shape, function, held = CASES[name]
    torch.manual_seed(0)
    model = stirred(Behind(function, held, shape))
    verdict = judge(model, [torch.randn(shape)], "mse")
    assert verdict.kind == "equal", verdict.detail


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "over samples": lambda x: x.max(0)[0], "repeated samples": lambda x: x.repeat(2, 1, 1, 1),
    "padding of samples": lambda x: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)),
    "statistics of samples": lambda x: x.var(0, keepdim=True), "positions": lambda x: x.max(1)[1].float() + x[:, 0],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mixing_samples_is_refused(name: str) -> None:
    verdict = judge(Behind(REFUSED[name], (), IMAGE), [torch.randn(IMAGE)], "mse")
    assert verdict.kind == "refused", verdict.detail
