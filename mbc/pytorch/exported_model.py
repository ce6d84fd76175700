"""The models that `mbc.from_torch` accepts, and the network of a model."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mbc.errors import MbcError
from mbc.interchange.pt2 import read_pt2
from mbc.interchange.steps import Imported
from mbc.interchange.translate import translate
from mbc.pytorch.copies import copy_model, release
from mbc.pytorch.model_tensors import output_tensors
from mbc.pytorch.own_backward import check_backward, checkpoints_opened, untouched, without_log

torch: Any = importlib.import_module("torch")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_ALL_MODULES = tuple(f"_global{name}" for name in MODULE_HOOKS)
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True, slots=True)
class Exported:
    """A network that was imported from a model, and the model's inputs.

    Attributes:
        network: The network.
        inputs: The number of the model's inputs.
        used: Positions of the inputs that the network reads, in the network's order.
    """

    network: Imported
    inputs: int
    used: tuple[int, ...]


def refuse_model(model: Any) -> None:
    """Raise MBC330 unless the argument is a model in training mode, on one device and without hooks.

    Raises:
        MbcError: MBC330.
    """
    if not isinstance(model, torch.nn.Module):
        raise MbcError("MBC330", f"a {type(model).__name__} is no torch.nn.Module", "pass the model itself")
    if not model.training:
        raise MbcError("MBC330", "the model is in eval mode", "call model.train() first")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise MbcError("MBC330", f"'{name}' has no shape yet", "call the model once: model(example)")
        if tensor.is_meta:
            remedy = 'make room and load them: model.to_empty(device="cpu"), then model.load_state_dict(…)'
            raise MbcError("MBC330", f"'{name}' is on the meta device and has no numbers", remedy)
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise MbcError(
            "MBC330", f"the model is on {', '.join(sorted(devices))}", "move all of it to the CPU or to one GPU"
        )
    _check_hooks(model)
    _check_memory(model)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            raise MbcError(
                "MBC330",
                f"the batch norm '{path}' averages its statistics over all steps (momentum=None), but mbc supports only"
                " exponential averages",
                "give it a momentum, which changes only its running statistics",
            )
    for device in {"cpu", *(device.partition(":")[0] for device in devices)}:
        if torch.is_autocast_enabled(device):
            raise MbcError(
                "MBC330",
                "autocast is on, which would become a part of the model",
                "call from_torch outside of autocast, and choose the type with precision='bf16'",
            )


def _check_hooks(model: Any) -> None:
    if any(getattr(torch.nn.modules.module, name, None) for name in HOOKS_OF_ALL_MODULES):
        raise MbcError("MBC330", "there are hooks of all modules, which mbc would not call", "remove them")
    for path, module in model.named_modules():
        if any(getattr(module, name, None) for name in MODULE_HOOKS):
            raise MbcError("MBC330", f"the module '{path}' has hooks, which mbc would not call", "remove them")
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, hooks, None) for hooks in PARAMETER_HOOKS):
            raise MbcError("MBC330", f"the parameter '{name}' has hooks, which mbc would not call", "remove them")


def _check_memory(model: Any) -> None:
    """Raise MBC330 if two tensors of a model share elements, because an update of one changes the other.

    Raises:
        MbcError: MBC330.
    """
    spans: list[tuple[int, int, str]] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and tensor.device.type != "meta" and tensor.layout is torch.strided:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name))
    for (_, end, first), (start, _, second) in pairwise(sorted(spans)):
        if start < end:
            raise MbcError(
                "MBC330",
                f"'{first}' and '{second}' are two tensors that share memory, which mbc would train separately",
                "make them one parameter (b.weight = a.weight), or give one of them memory of its own"
                " (b.weight.data = a.weight.data.clone())",
            )


def network_of(model: Any, example: Sequence[Any], trained: set[int]) -> Exported:
    """Return the network of a model; parameters that are not in `trained` (by `id`) are frozen.

    Only copies of the model are run and exported.

    Raises:
        MbcError: MBC330 for a model that torch.export does not export, or with a backward pass of its own; MBC303 for
            everything that cannot be translated.
    """
    failed = check_backward(model, example)
    twin = copy_model(model)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.requires_grad_(own.requires_grad and id(own) in trained)
    with tempfile.TemporaryDirectory() as folder, untouched(model):
        file = Path(folder) / "model.pt2"
        try:
            export_model(twin, tuple(tensor.detach().cpu() for tensor in example), file)
        except MbcError as error:
            raise failed or error from error.__cause__
        read = replace(read_pt2(file), is_training=True)  # a model in eval mode has been refused
    network = translate(read, type(model).__name__.lower())
    if failed is not None:  # the export and the translation found no more specific error
        raise failed
    used = tuple(read.inputs.index(name) for name, _ in network.inputs)
    return Exported(network, len(read.inputs), used)


def export_model(twin: Any, example: tuple[Any, ...], file: Path) -> Any:
    """Return the exported program of a copy of a model, and save it; the copy's tensors are removed afterwards.

    Args:
        twin: The copy.
        example: Inputs of the model.
        file: The .pt2 file to write.

    Raises:
        MbcError: MBC330 if torch.export does not export the model.
    """
    forward = twin.forward

    @functools.wraps(forward)
    def flat(*inputs: Any, **named: Any) -> tuple[Any, ...]:  # PyTorch does not save outputs of a user's own classes
        return output_tensors(forward(*inputs, **named))

    twin.forward = flat
    try:
        with untouched(), checkpoints_opened(), without_log(), torch.inference_mode(False), torch.enable_grad():
            program = torch.export.export(twin, example)
            torch.export.save(program, file)
    except MbcError:
        raise
    except Exception as error:  # the model or PyTorch may raise any exception
        first = str(error).strip().partition("\n")[0]
        reason = f"torch.export does not export the model: {first}"
        raise MbcError(
            "MBC330", reason, "change the model so that torch.export.export(model, example) succeeds"
        ) from error
    finally:
        release(twin)
    return program
