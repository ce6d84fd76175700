"""Copies of a model that share nothing with the model; they are exported, run and checked."""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from typing import Any

torch: Any = importlib.import_module("torch")
importlib.import_module("torch._dynamo")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
          "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # fmt: skip
_COMPILED = ("_compiled_call_impl",)  # set by Module.compile


def copy_model(model: Any, device: str | None = "cpu", dtype: Any = None, shapes: Any = None) -> Any:
    """Return a copy of a model with parameters and buffers of its own, and without hooks.

    Attributes that cannot be copied (locks, files, generators) are shared, because a forward pass may need them. Code
    that torch.compile generated is left out.

    Args:
        model: A `torch.nn.Module`.
        device: The device of the copy's tensors; None shares the tensors between model and copy.
        dtype: The type of its floating-point tensors; None keeps the types.
        shapes: A `FakeTensorMode`, in which the copy's parameters, buffers and attributes have shapes without numbers.
    """

    def moved(tensor: Any) -> Any:
        if device is None:
            return tensor
        with shapes or nullcontext():
            data = tensor.detach().to(device, copy=True)
        if dtype is not None and data.is_floating_point():
            data = data.to(dtype)
        return torch.nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else data

    modules = list(model.modules())
    memo: dict[int, Any] = {id(own): own.__class__.__new__(own.__class__) for own in modules}
    for own in modules:
        for table in (own._parameters, own._buffers):
            for tensor in table.values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = moved(tensor)
    for own in modules:
        twin = memo[id(own)]
        for name, value in own.__dict__.items():
            if name in _COMPILED:
                twin.__dict__[name] = None  # the value would call the original module
            elif name in _HOOKS:
                twin.__dict__[name] = value.__class__()
            elif isinstance(value, torch.Tensor) and id(value) not in memo:
                twin.__dict__[name] = moved(value)
            else:
                twin.__dict__[name] = _copied(value, memo)
        if isinstance(own, torch._dynamo.OptimizedModule):
            twin.__dict__["forward"] = memo[id(own._orig_mod)].__call__
    return memo[id(model)]


def release(twin: Any) -> None:
    """Remove a copy's tensors, because torch.export leaves circles of references that keep the copy alive."""
    for module in twin.modules():
        module._parameters.clear()
        module._buffers.clear()


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # an object that cannot be copied may raise any exception
        return value
