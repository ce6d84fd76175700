"""The sections `train { … }` and `memory { … }`: optimizer, precision, limits of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.evaluate import Evaluator
from mbc.frontend.frame import Frame
from mbc.frontend.near import suggest
from mbc.frontend.parameter_entries import NONE, Group, Pattern, read_frozen, read_groups, read_no_decay
from mbc.frontend.pytorch import Place
from mbc.frontend.settings import Given, check, check_names
from mbc.frontend.values import Bytes, WordValue, describe, is_number
from mbc.ir.graph import NO_OPTIMIZER, Optimizer
from mbc.ir.types import Precision
from mbc.ops.base import Parameter, Setting
from mbc.source import Span

OPTIMIZERS: Mapping[str, tuple[Parameter, ...]] = MappingProxyType(
    {
        "sgd": (
            Parameter("momentum", "float", 0.0),
            Parameter("nesterov", "bool", False),
            Parameter("weight_decay", "float", 0.0),
        ),
        "adamw": (
            Parameter("beta1", "float", 0.9),
            Parameter("beta2", "float", 0.999),
            Parameter("eps", "float", 1e-8),
            Parameter("weight_decay", "float", 0.01),
        ),
        "lars": (
            Parameter("momentum", "float", 0.9),
            Parameter("nesterov", "bool", False),
            Parameter("weight_decay", "float", 1e-4),
            Parameter("trust", "float", 1e-3),
            Parameter("eps", "float", 1e-8),
        ),
        "lamb": (
            Parameter("beta1", "float", 0.9),
            Parameter("beta2", "float", 0.999),
            Parameter("eps", "float", 1e-6),
            Parameter("weight_decay", "float", 0.01),
        ),
        NO_OPTIMIZER: (),
    }
)
AUTO = "auto"
MOST_ACCUMULATED = 1024


@dataclass(frozen=True, slots=True)
class Sections:
    """The settings of both sections. None for bytes, or for a choice: `auto`."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precision = Precision.FP32
    deterministic: bool = False
    allow_emulated_fp32: bool = True
    sync_batch_norm: bool = False
    shard_optimizer: bool | None = None
    no_decay: str = ""
    groups: tuple[Group, ...] = ()
    frozen: tuple[Pattern, ...] = ()
    clip_norm: float = 0.0
    clip_value: float = 0.0
    ema: float = 0.0
    accumulate: int = 1
    noise_scale: bool = False
    input_gradients: bool = False
    device_bytes: int | None = None
    host_bytes: int | None = None
    peer_bytes: int = 0

    @property
    def rule(self) -> Optimizer:
        """The optimizer with the settings of some parameters, and those of gradients and weights."""
        return replace(
            self.optimizer,
            no_decay=self.no_decay,
            groups=tuple(g.group for g in self.groups),
            frozen=tuple(pattern.text for pattern in self.frozen),
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            ema=self.ema,
            accumulate=self.accumulate,
            noise_scale=self.noise_scale,
            input_gradients=self.input_gradients,
        )

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """All patterns of names of parameters."""
        return (*(g.pattern for g in self.groups), *self.frozen)


Entry = Callable[[Sections, ast.Expression, Evaluator, Frame], Sections]


def _optimizer(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    call = ast.Call(value.span, value.text, ()) if isinstance(value, ast.Name) else value
    if not isinstance(call, ast.Call) or call.name not in OPTIMIZERS:
        name = call.name if isinstance(call, ast.Call) else ""
        message = f"there is no optimizer `{name}`" if name else "an optimizer is needed here"
        raise MbcError("MBC025", message, suggest(name, OPTIMIZERS, "optimizers", Place.OPTIMIZER), value.span)
    check_names(call.name, [p.name for p in OPTIMIZERS[call.name]], call.arguments)
    given = [Given(a.name, evaluator.evaluate(a.value, frame), a.span) for a in call.arguments]
    settings = check(call.name, OPTIMIZERS[call.name], given, call.span)
    _check_optimizer(call.name, settings, call.span)
    numbers = {name: float(number) for name, number in settings.items() if isinstance(number, float)}
    optimizer = replace(Optimizer(call.name, nesterov=settings.get("nesterov") is True), **numbers)
    return replace(sections, optimizer=optimizer)


def optimizer_text(optimizer: Optimizer) -> str:
    """Return the value of `train.optimizer` that gives `optimizer`, as text of the language."""
    values = {parameter.name: getattr(optimizer, parameter.name) for parameter in OPTIMIZERS[optimizer.kind]}
    return f"{optimizer.kind}({', '.join(f'{name}={str(value).lower()}' for name, value in values.items())})"


def _check_optimizer(name: str, settings: dict[str, Setting], span: Span) -> None:
    for setting, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        below_one = setting in ("momentum", "beta1", "beta2")
        if value < 0 or (below_one and value >= 1) or (setting in ("eps", "trust") and value == 0):
            allowed = "positive" if setting in ("eps", "trust") else "at least 0"
            allowed += " and less than 1" if below_one else ""
            message = f"`{setting}` of `{name}` is {value}, but must be {allowed}"
            raise MbcError("MBC025", message, f"write a `{setting}` that is {allowed}", span)
    if settings.get("nesterov") and not settings.get("momentum"):
        raise MbcError("MBC025", "nesterov needs momentum", f"write {name}(momentum=0.9, nesterov=true)", span)


def _precision(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    names = [p.value for p in Precision]
    if not isinstance(value, ast.Name) or value.text not in names:
        text = value.text if isinstance(value, ast.Name) else ""
        message = f"`{text}` is not a precision" if text else "a precision is needed here"
        raise MbcError("MBC025", message, suggest(text, names, "precisions", Place.PRECISION), value.span)
    return replace(sections, precision=Precision(value.text))


def _deterministic(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, deterministic=_flag("deterministic", value, evaluator, frame))


def _emulated_fp32(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    # Allowed in any precision, so that `--set train.precision` needs no other change; only fp32 is emulated.
    return replace(sections, allow_emulated_fp32=_flag("allow_emulated_fp32", value, evaluator, frame))


def _sync_batch_norm(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    # Allowed on any number of GPUs, so that `--gpus` needs no other change; one GPU has all rows.
    return replace(sections, sync_batch_norm=_flag("sync_batch_norm", value, evaluator, frame))


def _shard_optimizer(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    # Allowed on any number of GPUs, so that `--gpus` needs no other change; one GPU has all states.
    if isinstance(value, ast.Name) and value.text == AUTO:
        return replace(sections, shard_optimizer=None)
    result = evaluator.evaluate(value, frame)
    if not isinstance(result, bool):
        message = f"`shard_optimizer` is true, false or {AUTO}, but this is {describe(result)}"
        raise MbcError("MBC025", message, f"write true, false or {AUTO}", value.span)
    return replace(sections, shard_optimizer=result)


def _no_decay(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, no_decay=read_no_decay(value))


def _groups(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, groups=read_groups(value, evaluator, frame))


def _frozen(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, frozen=read_frozen(value))


def _clip_norm(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, clip_norm=_limit("clip_norm", value, evaluator, frame))


def _clip_value(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, clip_value=_limit("clip_value", value, evaluator, frame))


def _ema(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    decay = _limit("ema", value, evaluator, frame)
    if decay >= 1:
        message = f"`ema` is {decay:g}, but must be less than 1: it is the weight of the old average in a step"
        raise MbcError("MBC025", message, f"write a decay such as ema = 0.9999, or ema = {NONE}", value.span)
    return replace(sections, ema=decay)


def _accumulate(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    result = evaluator.evaluate(value, frame)
    if not isinstance(result, int) or isinstance(result, bool) or not 1 <= result <= MOST_ACCUMULATED:
        message = f"`accumulate` must be a whole number from 1 to {MOST_ACCUMULATED}, but is {describe(result)}"
        raise MbcError(
            "MBC025", message, "write the number of mini-batches of a step, such as accumulate = 4", value.span
        )
    return replace(sections, accumulate=result)


def _noise_scale(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, noise_scale=_flag("noise_scale", value, evaluator, frame))


def _input_gradients(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, input_gradients=_flag("input_gradients", value, evaluator, frame))


def _limit(name: str, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> float:
    """Return a positive number, or 0 for `none`."""
    if isinstance(value, ast.Name) and value.text == NONE:
        return 0.0
    result = evaluator.evaluate(value, frame)
    if not is_number(result) or result <= 0:
        message = f"`{name}` must be a positive number, but is {describe(result)}"
        raise MbcError("MBC025", message, f"write a positive number, or {name} = {NONE}", value.span)
    return float(result)


def _flag(name: str, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> bool:
    result = evaluator.evaluate(value, frame)
    if not isinstance(result, bool):
        message = f"`{name}` is true or false, but this is {describe(result)}"
        raise MbcError("MBC025", message, "write true or false", value.span)
    return result


def _device(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    return replace(sections, device_bytes=_bytes("device", 1, value, evaluator, frame))


def _host(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    # 0 bytes is a limit, too: then a plan moves nothing there.
    return replace(sections, host_bytes=_bytes("host", 0, value, evaluator, frame))


def _peers(sections: Sections, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Sections:
    if isinstance(value, ast.Name) and value.text == AUTO:
        message = "`memory.peers` is a size with a unit: the free memory of another GPU is not known here"
        raise MbcError("MBC026", message, "write how much of it a plan may use, such as 40 GB", value.span)
    return replace(sections, peer_bytes=_bytes("peers", 0, value, evaluator, frame) or 0)


def _bytes(name: str, least: int, value: ast.Expression, evaluator: Evaluator, frame: Frame) -> int | None:
    allowed = "positive" if least else "0 B or more"
    negated = value.operand if isinstance(value, ast.Unary) and value.operator == "-" else None
    if negated is not None and isinstance(evaluator.evaluate(negated, frame), Bytes):
        message = f"`memory.{name}` is negative, but must be {allowed}"
        raise MbcError("MBC026", message, "write a size that a machine can have, such as 12 GB", value.span)
    result = WordValue(value.text) if isinstance(value, ast.Name) else evaluator.evaluate(value, frame)
    if isinstance(result, WordValue) and result.text == AUTO:
        return None
    if not isinstance(result, Bytes):
        message = f"`memory.{name}` is a size with a unit, or {AUTO}, but this is {describe(result)}"
        raise MbcError("MBC026", message, "write a unit, such as 12 GB (10^9 bytes) or 8 GiB (2^30)", value.span)
    if not least <= result.size_bytes < 2**62:
        message = f"`memory.{name}` is {result.size_bytes} bytes"
        message += f", but must be {allowed}" if result.size_bytes < least else ""
        raise MbcError("MBC026", message, "write a size that a machine can have", value.span)
    return result.size_bytes


ENTRIES: Mapping[str, Mapping[str, Entry]] = MappingProxyType(
    {
        "train": MappingProxyType(
            {
                "optimizer": _optimizer,
                "no_decay": _no_decay,
                "groups": _groups,
                "frozen": _frozen,
                "clip_norm": _clip_norm,
                "clip_value": _clip_value,
                "ema": _ema,
                "accumulate": _accumulate,
                "noise_scale": _noise_scale,
                "input_gradients": _input_gradients,
                "precision": _precision,
                "deterministic": _deterministic,
                "allow_emulated_fp32": _emulated_fp32,
                "sync_batch_norm": _sync_batch_norm,
                "shard_optimizer": _shard_optimizer,
            }
        ),
        "memory": MappingProxyType({"device": _device, "host": _host, "peers": _peers}),
    }
)


def read_sections(
    sections: tuple[ast.Section, ...], overrides: Mapping[str, ast.Expression], evaluator: Evaluator, frame: Frame
) -> Sections:
    """Return the settings of the source's sections, with `overrides` in place of some.

    Args:
        sections: The sections of the source.
        overrides: Values by dotted name, such as `memory.device`.
        evaluator: Evaluates the values.
        frame: The frame of the values.

    Raises:
        MbcError: MBC012 (given twice), MBC024 (no such entry), MBC025 and MBC026 (values).
    """
    settings = Sections()
    seen: dict[str, Span] = {}
    for section in sections:
        for entry in section.entries:
            name = f"{section.name}.{entry.name}"
            entries = ENTRIES[section.name]
            if entry.name not in entries:
                message = f"section `{section.name}` has no `{entry.name}`"
                raise MbcError("MBC024", message, suggest(entry.name, entries, "entries", Place.ENTRY), entry.span)
            if name in seen:
                message = f"`{name}` is set twice, first in line {seen[name].line}"
                raise MbcError("MBC012", message, "set it once", entry.span)
            seen[name] = entry.span
            # An entry is checked even if an override replaces it.
            settings = entries[entry.name](settings, entry.value, evaluator, frame)
    for name, value in overrides.items():
        section, _, entry = name.partition(".")
        settings = ENTRIES[section][entry](settings, value, evaluator, frame)
    return settings
