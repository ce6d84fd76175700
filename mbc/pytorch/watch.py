"""Changes of a model and its optimizer that a trainer would not notice; they are looked for at each step."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

from mbc.errors import MbcError
from mbc.pytorch.exported_model import MODULE_HOOKS, PARAMETER_HOOKS

torch: Any = importlib.import_module("torch")
_PLAIN = (bool, int, float, str, tuple, type(None))
_GONE = "gone"
_WATCHED_ELSEWHERE = ("training", "_is_full_backward_hook", "num_batches_tracked")  # as modes, hooks, and counters
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_REMEDY = "close the trainer, make the change, and make another trainer: trainer.close(); mbc.from_torch(...)"


class Watch:
    """The settings of a model, its losses and its optimizer at the time when the trainer was created.

    Compared are settings of PyTorch's own layers, modes, the tensors that modules hold, `requires_grad`, hooks, and the
    parameters of the optimizer. Attributes of a user's own modules are not compared, because a forward pass may change
    them.
    """

    def __init__(self, model: Any, losses: Sequence[Any], optimizer: Any, precision: str) -> None:
        """Record the settings."""
        self._model, self._precision = model, precision
        named = [*model.named_modules(), *((f"loss.{n}", loss) for n, loss in enumerate(losses))]
        self._entries = [entry for path, module in named for entry in _entries(path, module)]
        self._modes = [(path, module, module.training) for path, module in model.named_modules()]
        self._parameters = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
        self._hooks = [
            (f"the hooks of '{path}'", hooks, len(hooks)) for path, module in named for hooks in _hooks(module)
        ]
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks = getattr(optimizer, name)
            self._hooks.append(("the hooks of the optimizer", hooks, len(hooks)))
        for number, group in enumerate(optimizer.param_groups):
            self._hooks.append((f"the number of parameters in group {number}", group["params"], len(group["params"])))

    def check(self) -> None:
        """Raise MBC338 for the first setting that has changed.

        Raises:
            MbcError: MBC338.
        """
        for name, held, key, before in self._entries:
            now = held.get(key, _GONE)
            if now is not before and (isinstance(before, torch.Tensor) or now != before):
                _refuse_change(name, before, now)
        if self._model.training:  # a model in eval mode is trained as well, because a validation may have left it so
            for path, module, before in self._modes:
                if module.training != before:
                    _refuse_change(f"{path}.training", before, module.training)
        for name, parameter, before in self._parameters:
            if parameter.requires_grad != before:
                _refuse_change(f"{name}.requires_grad", before, parameter.requires_grad)
            if any(getattr(parameter, hooks) for hooks in PARAMETER_HOOKS):
                _refuse_change(f"hooks of '{name}'", 0, 1)
        for name, held, before in self._hooks:
            if len(held) != before:
                _refuse_change(name, before, len(held))
        self._check_autocast()

    def _check_autocast(self) -> None:
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                asked = _PRECISIONS.get(torch.get_autocast_dtype(device), "?")
                if asked != self._precision:
                    raise MbcError(
                        "MBC338",
                        f"autocast asks for {asked} around a step, but the trainer computes in {self._precision}",
                        f"leave autocast out, or make the trainer with precision='{asked}'",
                    )


def settings_of(model: Any) -> list[tuple[str, Mapping[str, Any], str, Any]]:
    """Return the plain attributes of all modules of a model: a name, the table, the key in the table, the value."""
    entries = (entry for path, module in model.named_modules() for entry in _entries(path, module, own=True))
    return [
        (name, table, key, copy.deepcopy(value))  # a list may change in place
        for name, table, key, value in entries
        if _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    return isinstance(value, _PLAIN)


def _entries(path: str, module: Any, own: bool = False) -> Iterator[tuple[str, Mapping[str, Any], str, Any]]:
    """Yield each tensor, module and setting of a module.

    Args:
        path: The module's name.
        module: The module.
        own: Whether attributes of a user's own modules are settings as well.

    Yields:
        A name for messages, the table, the key in the table, and the object.
    """
    for table in (module._parameters, module._buffers, module._modules):
        for key, held in table.items():
            if key not in _WATCHED_ELSEWHERE:
                yield f"{path}.{key}" if path else key, table, key, held
    if own or module.__class__.__module__.startswith("torch.nn."):
        for key, value in module.__dict__.items():
            if _is_plain(value) and key not in _WATCHED_ELSEWHERE:
                yield f"{path}.{key}" if path else key, module.__dict__, key, value


def _hooks(module: Any) -> Iterator[Any]:
    for name in MODULE_HOOKS:
        yield getattr(module, name)


def _refuse_change(name: str, before: object, now: object) -> NoReturn:
    values = f"was {before!r} and is {now!r} now" if isinstance(before, _PLAIN) else "has been replaced"
    raise MbcError("MBC338", f"'{name}' {values}, which the trainer ignores", _REMEDY)
