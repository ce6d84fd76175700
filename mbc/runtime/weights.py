"""What a module keeps in a checkpoint: its states, and the counters of its control block."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.averages import average_name
from mbc.runtime.arguments import plain_array, shown
from mbc.runtime.checkpoint import FLOATING, INTEGERS, NAMES, Checkpoint, Tensor

Array = NDArray[Any]
KEPT = "state_dict."  # begins what an imported file keeps for an export, and no network has


@dataclass(frozen=True, slots=True)
class Counter:
    """A field of the control block: its type in a checkpoint, and the largest value that the block has room for."""

    dtype: type[np.int64 | np.float32]
    largest: float

    def allows(self, value: Any) -> bool:
        least = 0 if self.dtype is np.int64 else np.finfo(np.float32).tiny
        return bool(math.isfinite(value) and least <= value <= self.largest)


_BEGIN = "begin a new training from its weights: mbc train --weights FILE, or Module.load(path, weights_only=True)"
_LONG, _SHORT = Counter(np.int64, (1 << 63) - 1), Counter(np.int64, (1 << 32) - 1)
COUNTERS: dict[str, Counter] = {
    "step": _LONG, "seed": _LONG, "updates": _SHORT, "skipped": _SHORT, "since_growth": _SHORT,
    "loss_scale": Counter(np.float32, float(np.finfo(np.float32).max)),
}  # fmt: skip


def counter_tensors(control: Array) -> list[tuple[str, Array]]:
    """The counters of a control record, as tensors of a checkpoint."""
    return [(f"control.{name}", control[name].astype(kind.dtype).reshape(1)) for name, kind in COUNTERS.items()]


def read_weights(
    path: Path, states: Mapping[str, tuple[int, ...]], strict: bool, weights: Collection[str] | None = None
) -> tuple[dict[str, Array], dict[str, Any]]:
    """States and counters of a file. `strict=False` takes what there is of them; `weights`: these alone, and what else
    belongs to a training may be there, of whatever optimizer.

    Raises MBC163 (no whole file, or counters out of range) and MBC164 (every missing, unexpected and mismatched name).
    """
    checkpoint = Checkpoint(path)
    found = checkpoint.tensors
    counters = {f"control.{name}": name for name in COUNTERS}
    if weights is None:
        expected = {name: (shape, FLOATING) for name, shape in states.items()}
        for tensor, name in counters.items():
            expected[tensor] = ((1,), INTEGERS if COUNTERS[name].dtype is np.int64 else FLOATING)
    else:
        counters = {}
        expected = {name: (states[name], FLOATING) for name in weights}
        found = {name: tensor for name, tensor in found.items() if not _of_training(name, weights)}
    _compare(f"'{path}'", "the file", expected, found, strict)
    arrays = checkpoint.read_all(name for name in expected if name in found)
    numbers = {name: arrays.pop(tensor)[0].item() for tensor, name in counters.items() if tensor in found}
    for name, number in numbers.items():
        if not COUNTERS[name].allows(number):
            raise MbcError(
                "MBC163",
                f"cannot read checkpoint '{path}': its counter 'control.{name}' is {number:g}",
                "give a file as Module.save wrote it",
            )
    return arrays, numbers


def check_averages_of(path: Path, weights: Collection[str], averages: Mapping[str, str]) -> None:
    """MBC212 where a checkpoint lacks the moving `averages` that a network keeps of its `weights`, or has some and the
    network keeps none. Raises MBC163, too."""
    found = Checkpoint(path).tensors
    if missing := [average for average in averages.values() if average not in found]:
        raise MbcError(
            "MBC212",
            f"'{path}' lacks moving averages that the network keeps ({len(missing)} names, such as {missing[0]})",
            f"compile without them, as the file was made (--set train.ema=none), or {_BEGIN}",
        )
    more = [name for name in map(average_name, weights) if name in found and name not in averages.values()]
    if more and not averages:
        raise MbcError(
            "MBC212",
            f"'{path}' has moving averages, and the network keeps none ({len(more)} names, such as {more[0]})",
            f"compile with them, as the file was made (--set train.ema=RATE), or {_BEGIN}",
        )


def fit_weights(given: object, states: Mapping[str, tuple[int, ...]], weights: Collection[str]) -> dict[str, Array]:
    """Arrays by name, as `Module.load_state_dict` gets them: of all states, or of the `weights` alone.

    Raises MBC164 (every missing, unexpected and mismatched name) and MBC165 (what NumPy cannot read).
    """
    if not isinstance(given, Mapping):
        raise MbcError("MBC164", f"{shown(given)} is no mapping of names to arrays", "pass what state_dict() returned")
    arrays = {
        str(name): plain_array(str(name), array) for name, array in cast("Mapping[object, object]", given).items()
    }
    whole = any(name in states and name not in weights for name in arrays)
    expected = {name: (shape, FLOATING) for name, shape in states.items() if whole or name in weights}
    found = {name: Tensor(NAMES.get(array.dtype, str(array.dtype)), array.shape) for name, array in arrays.items()}
    _compare("the state dict", "the dict", expected, found, strict=True)
    return arrays


def _of_training(name: str, weights: Collection[str]) -> bool:
    """Whether it is a counter, or state of an optimizer, which is named `first.weight.momentum`; or kept for an
    export."""
    return name not in weights and (name.startswith(("control.", KEPT)) or name.rpartition(".")[0] in weights)


def _compare(
    what: str,
    whose: str,
    expected: Mapping[str, tuple[tuple[int, ...], frozenset[str]]],
    found: Mapping[str, Tensor],
    strict: bool,
) -> None:
    """MBC164 with every missing, unexpected and mismatched name."""
    lines: dict[str, str] = {}
    if strict:
        lines |= {n: f"missing     {n} {list(shape)}" for n, (shape, _) in expected.items() if n not in found}
        lines |= {n: f"unexpected  {n} {list(t.shape)}" for n, t in found.items() if n not in expected}
    for name, (shape, dtypes) in expected.items():
        tensor = found.get(name)
        if tensor is not None and tensor.shape != shape:
            lines[name] = f"mismatched  {name}: the network has {list(shape)}, {whose} {list(tensor.shape)}"
        elif tensor is not None and tensor.dtype not in dtypes:
            kind = "floating-point numbers" if dtypes is FLOATING else "integers"
            lines[name] = f"mismatched  {name}: the network has {kind}, {whose} {tensor.dtype}"
    if lines:
        listed = "\n  ".join(lines.values())
        weights = {*expected, *found}
        raise MbcError(
            "MBC164",
            f"{what} does not fit the network ({len(lines)} names):\n  {listed}",
            f"the optimizer, or which parameters are frozen, has changed: {_BEGIN}"
            if all(name.rpartition(".")[0] in weights for name in lines)
            else "load it into the network that it is of",
        )
