"""Which models are taken, and the network that one computes."""

from __future__ import annotations

import copy
import importlib
import tempfile
from pathlib import Path
from typing import Any

from mbc.errors import MbcError
from mbc.interchange.pt2 import read_pt2
from mbc.interchange.steps import Imported
from mbc.interchange.translate import translate
from mbc.pytorch.weights import Hook

torch: Any = importlib.import_module("torch")
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL_MODULES = tuple(f"_global{name}" for name in _OF_MODULES)
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_model(model: Any) -> None:
    """MBC330 for what is no model in training mode, on one device and without hooks."""
    if not isinstance(model, torch.nn.Module):
        raise MbcError("MBC330", f"a {type(model).__name__} is no torch.nn.Module", "pass the model itself")
    if not model.training:
        raise MbcError("MBC330", "the model is in eval mode", "call model.train() first")
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or "meta" in devices:
        raise MbcError(
            "MBC330", f"the model lies on {', '.join(sorted(devices))}", "move all of it to the CPU or to one GPU"
        )
    if any(getattr(torch.nn.modules.module, name, None) for name in _OF_ALL_MODULES):
        raise MbcError("MBC330", "there are hooks of all modules, which mbc would not call", "remove them")
    for path, module in model.named_modules():
        if any(not isinstance(hook, Hook) for name in _OF_MODULES for hook in getattr(module, name, {}).values()):
            raise MbcError("MBC330", f"the module '{path}' has hooks, which mbc would not call", "remove them")
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, hooks, None) for hooks in _OF_PARAMETERS):
            raise MbcError("MBC330", f"the parameter '{name}' has hooks, which mbc would not call", "remove them")


def network_of(model: Any, example: tuple[Any, ...], trained: set[int]) -> Imported:
    """The network of a model, whose parameters but for those `trained` (by `id`) are frozen. The model itself is left
    as it is: what is exported is a copy on the CPU. MBC303 for all that cannot be taken."""
    twin = copy.deepcopy(model).cpu()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.requires_grad_(own.requires_grad and id(own) in trained)
    try:
        program = torch.export.export(twin, tuple(tensor.detach().cpu() for tensor in example))
    except Exception as error:  # whatever the model or torch raises
        first = str(error).strip().partition("\n")[0]
        reason = f"torch.export does not take the model: {first}"
        raise MbcError("MBC330", reason, "let torch.export.export(model, example) pass") from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        torch.export.save(program, file)
        return translate(read_pt2(file), type(model).__name__.lower())
