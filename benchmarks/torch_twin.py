"""Networks of mbc run by PyTorch: an independent reference for results and gradients, in float64 or another precision.

`mbc.bench.torch_network` executes the forward graph with torch functions, and autograd computes the gradients. None of
mbc's own arithmetic is used, except for the mask of dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import Tensor  # pyright: ignore[reportMissingImports]

from mbc.bench.recipe import dropout_masks
from mbc.bench.torch_network import TorchNetwork
from mbc.ir.graph import Network, Optimizer, Role


@dataclass(frozen=True)
class Mode:
    """How torch computes. `autocast`: type to which operands of convolutions and products are cast, or None."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None
    channels_last: bool = False
    training: bool = True


@dataclass(frozen=True)
class Result:
    """Results of a step: gradients by parameter, and statistics after the step, all as float64 arrays."""

    loss: float
    outputs: tuple[np.ndarray, ...]
    gradients: Mapping[str, np.ndarray]
    statistics: Mapping[str, np.ndarray]


class Twin:
    """A network in torch. `states`: parameters and statistics by name, as canonical arrays."""

    def __init__(self, network: Network, states: Mapping[str, np.ndarray], mode: Mode = Mode()) -> None:
        """Take a network and its states."""
        self.network, self.mode = network, mode
        self.module = TorchNetwork(network, states, mode.dtype, mode.device, mode.channels_last).train(mode.training)
        self.parameters = {
            state.value: getattr(self.module, state.value.replace(".", "__"))
            for state in network.states
            if network.values[state.value].role is Role.PARAMETER
        }

    def place(self, inputs: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
        """Return the inputs as tensors for this mode; integers become class indices."""
        return self.module.place(inputs)

    def forward(self, inputs: Sequence[Tensor], seed: int = 0, step: int = 0) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss and the outputs. In training mode the running statistics are updated."""
        masks = dropout_masks(self.network, seed, step) if self.mode.training else {}
        placed = {name: torch.tensor(mask, device=self.mode.device) for name, mask in masks.items()}
        device = self.mode.device.split(":")[0]
        with torch.autocast(device, self.mode.autocast) if self.mode.autocast else nullcontext():
            return self.module(inputs, placed)

    def gradients(self, inputs: Sequence[np.ndarray], seed: int = 0, step: int = 0, loss_scale: float = 1.0) -> Result:
        """Return the result of one forward and backward pass; gradients are divided by the loss scale."""
        loss, outputs = self.forward(self.place(inputs), seed, step)
        names = list(self.parameters)
        scaled = torch.autograd.grad(loss * loss_scale, [self.parameters[n] for n in names], allow_unused=True)
        result = [None if g is None else g / loss_scale for g in scaled]
        return Result(
            float(loss.detach()),
            tuple(_array(o) for o in outputs),
            {n: _array(g) for n, g in zip(names, result, strict=True) if g is not None},
            {n: array for n, array in self.states().items() if n not in self.parameters},
        )

    def optimizer(self, rule: Optimizer, lr: float) -> torch.optim.Optimizer:
        """Return torch's own optimizer with the network's settings."""
        return self.module.optimizer(rule, lr)

    def states(self) -> dict[str, np.ndarray]:
        """Return the current parameters and statistics."""
        return self.module.states()


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).cpu().numpy()
