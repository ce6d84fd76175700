"""Any network of mbc as a PyTorch module. Imported only where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.bench.recipe import Call, recipe
from mbc.equivalence.torch_functions import FUNCTIONS, TAKES_BIAS, F, Tensor, torch
from mbc.ir.graph import Network, Optimizer, Role
from mbc.ir.parameter_groups import ParameterSettings, is_trained, settings_of
from mbc.ops.random import Dropout

Array = NDArray[Any]
Base: Any = torch.nn.Module


class TorchNetwork(Base):
    """A network of mbc as a PyTorch module.

    `states` are parameters and statistics by name, as canonical arrays. `dtype` is the type in which the module stores
    them.
    """

    def __init__(
        self, network: Network, states: Mapping[str, Array], dtype: Any, device: str, channels_last: bool
    ) -> None:
        """Create parameters and statistics from the given states."""
        Base.__init__(self)
        self._calls = recipe(network, TAKES_BIAS)
        self._inputs, self._outputs, self._losses = network.inputs, network.outputs, network.losses
        self._values = network.values
        self._dtype, self._device, self._channels_last = dtype, device, channels_last
        self._averages: list[Tensor] = []
        self._attribute: dict[str, str] = {}  # PyTorch's names have no dots
        for state in network.states:
            name = self._attribute[state.value] = state.value.replace(".", "__")
            tensor = self._placed(np.asarray(states[state.value]))
            if network.values[state.value].role is Role.PARAMETER:
                self.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def forward(self, inputs: Sequence[Tensor], masks: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss and the outputs; in training mode, running statistics are updated.

        Args:
            inputs: Tensors of the inputs.
            masks: Dropout masks by operation; None to let PyTorch draw them.
        """
        values: dict[str, Tensor] = {state: getattr(self, name) for state, name in self._attribute.items()}
        values.update(zip(self._inputs, inputs, strict=True))
        for call in self._calls:
            values.update(call.named(self._run(call, [values[name] for name in call.operands], masks)))
            for name in call.dead:
                del values[name]
        loss = sum(weight * values[name].reshape(()) for name, weight in self._losses)
        return loss, tuple(values[name] for name in self._outputs)

    def place(self, inputs: Sequence[Array]) -> tuple[Tensor, ...]:
        """Return inputs as tensors on the device; whole numbers become class indices."""
        return tuple(
            torch.tensor(array.astype(np.int64), device=self._device)
            if np.issubdtype(array.dtype, np.integer)
            else self._placed(array)
            for array in inputs
        )

    def optimizer(self, rule: Optimizer, learning_rate: float, **settings: Any) -> Any:
        """Return PyTorch's own optimizer with the network's settings: a group for each rate and weight decay.

        Frozen parameters get no gradient from now on.
        """
        alike: dict[ParameterSettings, list[Tensor]] = {}
        for state, name in self._attribute.items():
            if is_trained(rule, self._values[state]):
                alike.setdefault(settings_of(rule, self._values[state]), []).append(getattr(self, name))
            else:
                getattr(self, name).requires_grad_(False)
        groups = [
            {"params": tensors, "lr": own.rate * learning_rate, "weight_decay": own.weight_decay}
            for own, tensors in alike.items()
        ]
        if rule.kind in ("lars", "lamb"):
            raise ValueError(f"PyTorch has no optimizer {rule.kind}")
        if rule.kind == "sgd":
            return torch.optim.SGD(groups, learning_rate, rule.momentum, nesterov=rule.nesterov, **settings)
        return torch.optim.AdamW(groups, learning_rate, (rule.beta1, rule.beta2), rule.eps, **settings)

    def clip(self, rule: Optimizer) -> None:
        """Clip the gradients as the network does."""
        if rule.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters(), rule.clip_norm)
        if rule.clip_value:
            torch.nn.utils.clip_grad_value_(self.parameters(), rule.clip_value)

    def average(self, rule: Optimizer) -> None:
        """Update the moving averages of trained parameters and of statistics, which start as copies."""
        values = ((self._values[state], getattr(self, name).detach()) for state, name in self._attribute.items())
        weights = [w for value, w in values if value.role is Role.STATISTIC or is_trained(rule, value)]
        if self._averages:
            torch._foreach_lerp_(self._averages, weights, 1 - rule.ema)
        else:
            self._averages = [w.clone() for w in weights]

    def states(self) -> dict[str, Array]:
        """Return the current parameters and statistics, in float64."""
        arrays = {state: getattr(self, name).detach() for state, name in self._attribute.items()}
        return {state: tensor.double().cpu().numpy() for state, tensor in arrays.items()}

    def gradients(self) -> dict[str, Array]:
        """Return the gradients of the parameters that have one, in float64."""
        arrays = {state: getattr(self, name).grad for state, name in self._attribute.items()}
        return {state: grad.double().cpu().numpy() for state, grad in arrays.items() if grad is not None}

    def _placed(self, array: Array) -> Tensor:
        tensor = torch.tensor(array, dtype=self._dtype, device=self._device)
        if self._channels_last and tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _run(self, call: Call, operands: list[Tensor], masks: Mapping[str, Tensor] | None) -> Tensor:
        a: Any = call.operation.attributes
        if call.operation.kind == "batch_norm":
            x, (affine, running) = operands[0], a.split(operands[1:])
            weight, bias = affine or (None, None)
            mean, variance = running or (None, None)
            training = (self.training and not a.frozen) or not running
            if (
                a.sync
                and training
                and running
                and torch.distributed.is_available()
                and torch.distributed.is_initialized()
            ):
                group = torch.distributed.group.WORLD
                # What nn.SyncBatchNorm calls, on GPUs only.
                apply = torch.nn.modules._functions.SyncBatchNorm.apply
                return apply(x, weight, bias, mean, variance, a.eps, a.momentum, group, group.size())
            return F.batch_norm(x, mean, variance, weight, bias, training, a.momentum, a.eps)
        if not isinstance(a, Dropout):
            return FUNCTIONS[call.operation.kind](a, *operands)
        (x,) = operands
        if masks is None or not self.training or a.probability == 0:
            if a.drawn(x.shape) != x.shape:  # one number for several elements
                return x * F.dropout(x.new_ones(a.drawn(x.shape)), a.probability, self.training)
            return F.dropout(x, a.probability, self.training)
        return x * masks[call.operation.name] / (1 - a.probability)
