"""Compares the inference pass of a plan with the model in eval mode.

The plan is made from the model in training mode. For most models, its network without dropout and with running
statistics computes what the model computes in eval mode. Exceptions are models whose `forward` reads `self.training`:
they return auxiliary outputs while they train, or join branches when they are evaluated.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.pytorch.copies import copy_model
from mbc.pytorch.model_tensors import first_rows, output_tensors, rows_of
from mbc.pytorch.own_backward import untouched
from mbc.pytorch.process_memory import free_unused

torch: Any = importlib.import_module("torch")
pytree: Any = importlib.import_module("torch.utils._pytree")
_ROWS = 2  # samples that are compared
# Largest allowed errors, relative to the norm of an output; deep networks add up the errors of their layers.
_LIMITS = {Precision.FP64: 1e-6, Precision.FP32: 1e-3, Precision.TF32: 0.03, Precision.FP16: 0.05, Precision.BF16: 0.15}


class EvalChecks:
    """The comparisons of some calls in eval mode; a difference that was found holds for all later calls."""

    def __init__(self, precision: Precision, flat: bool = False) -> None:
        """Begin before the first call.

        Args:
            precision: The precision of the plan.
            flat: Whether only the tensors of the outputs are compared, and not how tuples and dicts contain them.
        """
        self._limit, self._flat, self._calls, self._difference = _LIMITS[precision], flat, 0, ""

    def reason(self, model: Any, inputs: Sequence[Any], compute: Callable[[Sequence[Any]], Any]) -> str:
        """Return how the plan's outputs differ from the model's outputs in eval mode; an empty text if they agree.

        The first call is compared, and the second, fourth, eighth and so on, because outputs may agree at first where
        weights are 0. Plan and model compute two samples, or the whole mini-batch if one of them takes no other number.

        Args:
            model: The model.
            inputs: The inputs of the call.
            compute: A function that returns the plan's outputs for some inputs.
        """
        self._calls += 1
        if not self._difference and not self._calls & (self._calls - 1):
            with suppress(torch.OutOfMemoryError):  # the GPU may have no memory for it beside the plan
                self._difference = self._compared(model, inputs, compute)
            free_unused()
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
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the model may raise anything, and may expect the whole mini-batch
                continue
            try:
                ours = compute(part)
            except MbcError:
                # The plan, too, may expect the whole mini-batch. If it refuses that, the call itself says why.
                if rows == batch:
                    return ""
                continue
            wanted = output_tensors(wanted) if self._flat else wanted
            return self._differing(pytree.tree_flatten(ours), pytree.tree_flatten(wanted))
        return "PyTorch raises an error for this call in eval mode"

    def _differing(self, ours: tuple[list[Any], Any], theirs: tuple[list[Any], Any]) -> str:
        if [*map(_kind, ours[0])] != [*map(_kind, theirs[0])] or ours[1] != theirs[1]:
            return "in eval mode it returns other outputs than in training mode, for which it was planned"
        for one, other in zip(ours[0], theirs[0], strict=True):
            if isinstance(one, torch.Tensor):
                wanted = other.double()
                limit = max(self._limit, _LIMITS[Precision.TF32] * other.is_cuda)  # PyTorch's convolutions may use TF32
                error, norm = (one.to(wanted) - wanted).norm(), wanted.norm()
                if error > limit * norm + 1e-6 * wanted.numel() ** 0.5:  # some, where outputs are 0
                    share = float(error / norm)
                    return f"in eval mode it computes something else: an output differs by {share:.1e} of its norm"
        return ""


def _kind(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
