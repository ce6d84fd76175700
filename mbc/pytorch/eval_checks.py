"""Compares the inference pass of a plan with the model in eval mode.

The plan is made from the model in training mode. Without dropout, and with running statistics, its network is most
models in eval mode, but not those that read `self.training` for more: that return auxiliary outputs while they train,
or join branches when they are evaluated.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from mbc.ir.types import Precision
from mbc.pytorch.copies import copy_model
from mbc.pytorch.model_tensors import first_rows, output_tensors, rows_of
from mbc.pytorch.own_backward import untouched

torch: Any = importlib.import_module("torch")
pytree: Any = importlib.import_module("torch.utils._pytree")
_ROWS = 2
# Errors relative to the norm of an output; deep networks add up those of their layers.
_LIMITS = {Precision.FP64: 1e-6, Precision.FP32: 1e-3, Precision.TF32: 0.03, Precision.FP16: 0.05, Precision.BF16: 0.15}


class EvalChecks:
    """Looks at some calls in eval mode; a difference holds for all later ones."""

    def __init__(self, precision: Precision, flat: bool = False) -> None:
        """Begin before the first call.

        Args:
            precision: The precision of the plan.
            flat: Whether tensors are compared without their structure.
        """
        self._limit, self._flat, self._calls, self._difference = _LIMITS[precision], flat, 0, ""

    def reason(self, model: Any, inputs: Sequence[Any], compute: Callable[[Sequence[Any]], Any]) -> str:
        """Return how the plan's outputs differ from the model's, for an inference pass; an empty text if they agree.

        The first call is compared, and the second, fourth, eighth, …: outputs may agree at first because weights are 0.
        Two samples are computed by both, or all if the model takes no other number.

        Args:
            model: The model.
            inputs: Its inputs.
            compute: Returns the plan's outputs for inputs.
        """
        self._calls += 1
        if not self._difference and not self._calls & (self._calls - 1):
            self._difference = self._compared(model, inputs, compute)
        return self._difference

    def _compared(self, model: Any, inputs: Sequence[Any], compute: Callable[[Sequence[Any]], Any]) -> str:
        twin, like = copy_model(model, None).eval(), next(model.parameters())
        inputs = [torch.as_tensor(x) for x in inputs]
        batch = rows_of(inputs)
        for rows in sorted({min(_ROWS, batch), batch}):
            part = first_rows(inputs, rows, like.device)
            try:
                with untouched(model), torch.no_grad():
                    wanted = twin(*(x.to(like.dtype) if x.is_floating_point() else x for x in part))
                wanted = output_tensors(wanted) if self._flat else wanted
                return self._differing(pytree.tree_flatten(compute(part)), pytree.tree_flatten(wanted))
            except torch.OutOfMemoryError:
                return ""
            except Exception:  # the model may raise anything, and both may expect the whole mini-batch
                continue
        return "PyTorch raises an error for this call in eval mode"

    def _differing(self, ours: tuple[list[Any], Any], theirs: tuple[list[Any], Any]) -> str:
        if [*map(_kind, ours[0])] != [*map(_kind, theirs[0])] or ours[1] != theirs[1]:
            return "in eval mode it returns other outputs than in training mode, for which it was planned"
        for one, other in zip(ours[0], theirs[0], strict=True):
            if isinstance(one, torch.Tensor):
                wanted = other.double()
                limit = max(self._limit, _LIMITS[Precision.TF32] * other.is_cuda)  # PyTorch's convolutions may use TF32
                off, norm = (one.to(wanted) - wanted).norm(), wanted.norm()
                if off > limit * norm + 1e-6 * wanted.numel() ** 0.5:  # 1e-6 of an element does not matter
                    return f"in eval mode it computes something else, of which an output is {float(off / norm):.1e} off"
        return ""


def _kind(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
