"""Inputs and outputs of a model."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from mbc.errors import MbcError

torch: Any = importlib.import_module("torch")
_PLAIN = (type(None), bool, int, float, str)


def example_tensors(example: Any) -> tuple[Any, ...]:
    """Return the inputs of a model as tensors.

    Raises:
        MbcError: MBC337 for anything else than tensors and NumPy arrays.
    """
    given = entries_of(example)
    if not given:
        raise MbcError("MBC337", "the example has no tensor", "pass a mini-batch, the arguments of a call of the model")
    tensors = tuple(_example_tensor(value, number) for number, value in enumerate(given, 1))
    if not rows_of(tensors):
        raise MbcError(
            "MBC337", "the example has no rows", "pass a whole mini-batch, whose first dimension is the samples"
        )
    return tensors


def _example_tensor(value: Any, number: int) -> Any:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_meta:
            return readable(value)
        what = f"tensor on {value.device} of {value.layout}"
    else:
        what = "dict" if isinstance(value, Mapping) else type(value).__name__
    raise MbcError(
        "MBC337",
        f"input {number} of the example is a {what}, but mbc takes only dense tensors",
        "pass the tensors that forward takes, several in a tuple: from_torch(model, (images, masks), ...)",
    )


def by_position(model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of `forward`; none if `forward` takes some of them by name only."""
    if not named:
        return inputs
    try:
        bound = inspect.signature(model.__class__.forward).bind(model, *inputs, **named)
    except (TypeError, ValueError):  # arguments that `forward` does not take, or a signature that is not known
        return ()
    return () if bound.kwargs else bound.args[1:]


def readable(given: Any) -> Any:
    """Return a tensor without its gradient and contiguous; half precision becomes float32."""
    if not isinstance(given, torch.Tensor):
        return given
    tensor = given.detach()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).contiguous()


def first_rows(example: Sequence[Any], rows: int, device: Any) -> tuple[Any, ...]:
    """Return copies of an example's tensors on a device, with at most `rows` samples of the mini-batch."""
    batch = rows_of(example)
    cut = (tensor[:rows] if tensor.ndim and tensor.shape[0] == batch else tensor for tensor in example)
    return tuple(tensor.detach().to(device, copy=True) for tensor in cut)


def rows_of(example: Sequence[Any]) -> int:
    """Return the number of samples of an example's mini-batch."""
    return next((tensor.shape[0] for tensor in example if tensor.ndim), 0)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors of nested outputs, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def output_tensors(value: Any) -> tuple[Any, ...]:
    """Return the tensors of a model's outputs.

    Raises:
        MbcError: MBC330 for an object that may hide tensors.
    """
    leaves = leaves_of(value)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise MbcError(
                "MBC330",
                f"the model returns a {type(leaf).__name__}, whose tensors mbc cannot find",
                "return tensors: alone, or in a tuple, list, dict or data class",
            )
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists, mappings and data classes."""
    if isinstance(value, Mapping):
        return [leaf for entry in cast("Mapping[Any, Any]", value).values() for leaf in leaves_of(entry)]
    if isinstance(value, (tuple, list)):
        return [leaf for entry in entries_of(cast("Any", value)) for leaf in leaves_of(entry)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [leaf for name in value.__dataclass_fields__ for leaf in leaves_of(getattr(value, name))]
    return [value]


def entries_of(given: Any) -> tuple[Any, ...]:
    """Return the entries of a tuple or list, or the one object that is given."""
    return tuple(cast("Sequence[Any]", given)) if isinstance(given, (tuple, list)) else (given,)
