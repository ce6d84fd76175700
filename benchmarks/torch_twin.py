"""Any mbc network run by PyTorch: an independent reference for results and gradients, in float64 or as users run it.

The forward graph (`mbc.ir.graph.Network`) is executed operation by operation with torch functions; autograd does the
rest. Nothing of mbc's own arithmetic is used, dropout's mask excepted, which is data.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mbc.ir.graph import Network, Operation, Optimizer, Role
from mbc.ops.random import Dropout, dropout_keep


@dataclass(frozen=True)
class Mode:
    """How torch computes. `autocast`: None, or the type that convolutions and products are cast to."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None
    channels_last: bool = False
    training: bool = True


@dataclass(frozen=True)
class Result:
    """`gradients` by parameter, `statistics` as they are after the step; all float64 arrays."""

    loss: float
    outputs: tuple[np.ndarray, ...]
    gradients: Mapping[str, np.ndarray]
    statistics: Mapping[str, np.ndarray]


class Twin:
    """A network in torch. `states` by name: parameters and statistics, canonical arrays."""

    def __init__(self, network: Network, states: Mapping[str, np.ndarray], mode: Mode = Mode()) -> None:
        self.network = network
        self.mode = mode
        self.parameters: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}
        for state in network.states:
            value = network.values[state.value]
            tensor = torch.tensor(np.asarray(states[state.value], np.float64), dtype=mode.dtype, device=mode.device)
            if value.role is Role.PARAMETER:
                if mode.channels_last and tensor.ndim == 4:
                    tensor = tensor.contiguous(memory_format=torch.channels_last)
                self.parameters[state.value] = tensor.requires_grad_()
            else:
                self.statistics[state.value] = tensor

    def place(self, inputs: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
        """Inputs as tensors of this mode; whole numbers become class indices."""
        placed: list[Tensor] = []
        for array in inputs:
            if np.issubdtype(array.dtype, np.integer):
                placed.append(torch.tensor(array.astype(np.int64), device=self.mode.device))
                continue
            tensor = torch.tensor(array, dtype=self.mode.dtype, device=self.mode.device)
            if self.mode.channels_last and tensor.ndim == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            placed.append(tensor)
        return tuple(placed)

    def forward(self, inputs: Sequence[Tensor], seed: int = 0, step: int = 0) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and outputs. In training mode the running statistics move."""
        values: dict[str, Tensor] = {**self.parameters, **self.statistics}
        values.update(zip(self.network.inputs, inputs, strict=True))
        device = self.mode.device.split(":")[0]
        cast = torch.autocast(device, self.mode.autocast) if self.mode.autocast else nullcontext()
        with cast:
            for operation in self.network.operations:
                operands = [values[name] for name in operation.inputs]
                made = self._run(operation, operands, seed, step)
                values[operation.outputs[0]] = made
        total = sum(weight * values[loss].reshape(()) for loss, weight in self.network.losses)
        assert isinstance(total, Tensor)
        return total, tuple(values[name] for name in self.network.outputs)

    def _run(self, operation: Operation, operands: list[Tensor], seed: int, step: int) -> Tensor:
        a: Any = operation.attributes
        if operation.kind == "batch_norm":
            return self._batch_norm(operation, a)(operands)
        if operation.kind == "dropout":
            return self._dropout(operation, a, operands[0], seed, step)
        return FUNCTIONS[operation.kind](a, *operands)

    def _batch_norm(self, operation: Operation, a: Any) -> Callable[[list[Tensor]], Tensor]:
        def run(operands: list[Tensor]) -> Tensor:
            x, *affine, mean, variance = operands
            weight, bias = affine if affine else (None, None)
            return F.batch_norm(x, mean, variance, weight, bias, self.mode.training, a.momentum, a.eps)

        return run

    def _dropout(self, operation: Operation, a: Dropout, x: Tensor, seed: int, step: int) -> Tensor:
        if not self.mode.training or a.probability == 0:
            return x
        keyed = Dropout(a.probability, zlib.crc32(operation.name.encode()))
        keep = dropout_keep(keyed, tuple(x.shape), 0, seed, step)
        return x * torch.tensor(keep, device=x.device) / (1 - a.probability)

    def gradients(self, inputs: Sequence[np.ndarray], seed: int = 0, step: int = 0, loss_scale: float = 1.0) -> Result:
        """One forward and backward pass; the scale is divided out again."""
        loss, outputs = self.forward(self.place(inputs), seed, step)
        names = list(self.parameters)
        scaled = torch.autograd.grad(loss * loss_scale, [self.parameters[n] for n in names], allow_unused=True)
        found = [None if g is None else g / loss_scale for g in scaled]
        return Result(
            float(loss.detach()),
            tuple(_array(o) for o in outputs),
            {n: _array(g) for n, g in zip(names, found, strict=True) if g is not None},
            {n: _array(s) for n, s in self.statistics.items()},
        )

    def optimizer(self, rule: Optimizer, lr: float) -> torch.optim.Optimizer:
        """Torch's own optimizer with the network's settings."""
        parameters = list(self.parameters.values())
        if rule.kind == "sgd":
            return torch.optim.SGD(
                parameters, lr, rule.momentum, weight_decay=rule.weight_decay, nesterov=rule.nesterov
            )
        return torch.optim.AdamW(parameters, lr, (rule.beta1, rule.beta2), rule.eps, rule.weight_decay)

    def states(self) -> dict[str, np.ndarray]:
        """Parameters and statistics as they are now."""
        return {n: _array(t) for n, t in (*self.parameters.items(), *self.statistics.items())}


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).cpu().numpy()


def _padded(x: Tensor, pad: Sequence[int], value: float = 0.0) -> Tensor:
    top, bottom, left, right = pad
    return F.pad(x, (left, right, top, bottom), value=value) if any(pad) else x


def _symmetric(pad: Sequence[int]) -> bool:
    return pad[0] == pad[1] and pad[2] == pad[3]


def _convolution(a: Any, x: Tensor, w: Tensor) -> Tensor:
    if _symmetric(a.pad):
        return F.conv2d(x, w, None, a.stride, (a.pad[0], a.pad[2]), a.dilation, a.groups)
    return F.conv2d(_padded(x, a.pad), w, None, a.stride, 0, a.dilation, a.groups)


def _transposed(a: Any, x: Tensor, w: Tensor) -> Tensor:
    """The whole image side, padding included, of which the padding is then cut off."""
    whole = F.conv_transpose2d(x, w, None, a.stride, 0, 0, a.groups, a.dilation)
    top, bottom, left, right = a.pad
    height, width = a.size[0] + top + bottom, a.size[1] + left + right
    # Rows and columns that no window reached are zero.
    whole = F.pad(whole, (0, max(0, width - whole.shape[3]), 0, max(0, height - whole.shape[2])))
    return whole[:, :, top : top + a.size[0], left : left + a.size[1]]


def _max_pool(a: Any, x: Tensor) -> Tensor:
    p, q = a.output_size
    if not a.ceil and _symmetric(a.pad) and 2 * a.pad[0] <= a.kernel[0] and 2 * a.pad[2] <= a.kernel[1]:
        return F.max_pool2d(x, a.kernel, a.stride, (a.pad[0], a.pad[2]))
    x = _padded(x, _reach(a, x, p, q), float("-inf"))
    return F.max_pool2d(x, a.kernel, a.stride)[:, :, :p, :q]


def _reach(a: Any, x: Tensor, p: int, q: int) -> tuple[int, int, int, int]:
    """Padding that lets every window of the output be whole."""
    below = max(a.pad[1], (p - 1) * a.stride[0] + a.kernel[0] - a.pad[0] - x.shape[2])
    right = max(a.pad[3], (q - 1) * a.stride[1] + a.kernel[1] - a.pad[2] - x.shape[3])
    return a.pad[0], below, a.pad[2], right


def _avg_pool(a: Any, x: Tensor) -> Tensor:
    p, q = a.output_size
    if not a.ceil and _symmetric(a.pad) and a.count_pad and 2 * a.pad[0] <= a.kernel[0] and 2 * a.pad[2] <= a.kernel[1]:
        return F.avg_pool2d(x, a.kernel, a.stride, (a.pad[0], a.pad[2]))
    reach = _reach(a, x, p, q)
    total = F.avg_pool2d(_padded(x, reach), a.kernel, a.stride, divisor_override=1)[:, :, :p, :q]
    inside = torch.ones_like(x[:1, :1])
    if a.count_pad:
        # Padding counts, but not what ceil mode adds beyond it.
        inside = _padded(inside, a.pad, 1.0)
        beyond = tuple(r - g for r, g in zip(reach, a.pad, strict=True))
        inside = _padded(inside, beyond)
    else:
        inside = _padded(inside, reach)
    count = F.avg_pool2d(inside, a.kernel, a.stride, divisor_override=1)[:, :, :p, :q]
    return total / count


def _lrn(a: Any, x: Tensor) -> Tensor:
    before, after = a.size // 2, (a.size - 1) // 2
    squares = F.pad((x * x).flatten(2), (0, 0, before, after)).reshape(x.shape[0], -1, *x.shape[2:])
    sums = sum(squares[:, i : i + x.shape[1]] for i in range(a.size))
    return x / (a.k + a.alpha / a.size * sums) ** a.beta


def _upsample(a: Any, x: Tensor) -> Tensor:
    return x.repeat_interleave(a.factor[0], 2).repeat_interleave(a.factor[1], 3)


def _cross_entropy(a: Any, logits: Tensor, target: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, target, label_smoothing=a.smoothing)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "convolution": _convolution,
    "convolution_backward_data": _transposed,
    "bias_add": lambda a, x, b: x + b.reshape(1, -1, *([1] * (x.ndim - 2))),
    "linear": lambda a, x, w: F.linear(x.flatten(1), w),
    "relu": lambda a, x: F.relu(x),
    "leaky_relu": lambda a, x: F.leaky_relu(x, a.slope),
    "sigmoid": lambda a, x: torch.sigmoid(x),
    "tanh": lambda a, x: torch.tanh(x),
    "silu": lambda a, x: F.silu(x),
    "gelu": lambda a, x: F.gelu(x),
    "add": lambda a, x, y: x + y,
    "mul": lambda a, x, y: x * y,
    "scale": lambda a, x: a.factor * x + a.offset,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "lrn": _lrn,
    "upsample": _upsample,
    "concat": lambda a, *xs: torch.cat(xs, 1),
    "flatten": lambda a, x: x.flatten(1),
    "softmax_cross_entropy": _cross_entropy,
    "mse": lambda a, x, y: F.mse_loss(x, y),
    "cast": lambda a, x: x,
}
