"""The tensors of a module's checkpoint: its states, and the counters of its control block."""

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
KEPT = "state_dict."  # prefix of tensors that an imported file keeps for an export, and that no network has


@dataclass(frozen=True, slots=True)
class Counter:
    """A field of the control block: its type in a checkpoint, and the largest value that fits the block."""

    dtype: type[np.int64 | np.float32]
    largest: float

    def allows(self, value: Any) -> bool:
        """Return whether the field can hold a value."""
        least = 0 if self.dtype is np.int64 else np.finfo(np.float32).tiny
        return bool(math.isfinite(value) and least <= value <= self.largest)


_BEGIN = "begin a new training from its weights: mbc train --weights FILE, or Module.load(path, weights_only=True)"
_LONG, _SHORT = Counter(np.int64, (1 << 63) - 1), Counter(np.int64, (1 << 32) - 1)
COUNTERS: dict[str, Counter] = {
    "step": _LONG, "seed": _LONG, "updates": _SHORT, "skipped": _SHORT, "since_growth": _SHORT,
    "loss_scale": Counter(np.float32, float(np.finfo(np.float32).max)),
}  # fmt: skip


def counter_tensors(control: Array) -> list[tuple[str, Array]]:
    """Return the counters of a control record as tensors of a checkpoint."""
    return [(f"control.{name}", control[name].astype(kind.dtype).reshape(1)) for name, kind in COUNTERS.items()]


def read_weights(
    path: Path, states: Mapping[str, tuple[int, ...]], strict: bool, weights: Collection[str] | None = None
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the states and the counters of a file.

    Args:
        path: The checkpoint.
        states: Shape of each state of the network.
        strict: Refuse missing and unexpected names; False reads the states and counters that the file has.
        weights: Names of the weights, to read these alone. The file may then also hold counters and optimizer state, of
            any optimizer. None: read everything.

    Raises:
        MbcError: MBC163 (not a complete file, or counters out of range) and MBC164 (every missing, unexpected and
            mismatched name).
    """
    checkpoint = Checkpoint(path)
    tensors = checkpoint.tensors
    counters = {f"control.{name}": name for name in COUNTERS}
    if weights is None:
        expected = {name: (shape, FLOATING) for name, shape in states.items()}
        for tensor, name in counters.items():
            expected[tensor] = ((1,), INTEGERS if COUNTERS[name].dtype is np.int64 else FLOATING)
    else:
        counters = {}
        expected = {name: (states[name], FLOATING) for name in weights}
        tensors = {name: tensor for name, tensor in tensors.items() if not _of_training(name, weights)}
    _compare(f"'{path}'", "the file", expected, tensors, strict)
    arrays = checkpoint.read_all(name for name in expected if name in tensors)
    numbers = {name: arrays.pop(tensor)[0].item() for tensor, name in counters.items() if tensor in tensors}
    for name, number in numbers.items():
        if not COUNTERS[name].allows(number):
            raise MbcError(
                "MBC163",
                f"cannot read checkpoint '{path}': its counter 'control.{name}' is {number:g}",
                "give a file that Module.save wrote",
            )
    return arrays, numbers


def check_averages_of(path: Path, weights: Collection[str], averages: Mapping[str, str]) -> None:
    """Raise an error if only one of a checkpoint and a network has moving averages.

    Args:
        path: The checkpoint.
        weights: Names of the network's weights.
        averages: The network's moving averages, by the names of their weights.

    Raises:
        MbcError: MBC212 if the file lacks averages that the network keeps, or has some and the network keeps none;
            MBC163 if the file cannot be read.
    """
    tensors = Checkpoint(path).tensors
    if missing := [average for average in averages.values() if average not in tensors]:
        raise MbcError(
            "MBC212",
            f"'{path}' lacks moving averages that the network keeps ({len(missing)} names, such as {missing[0]})",
            f"compile without moving averages, like the file (--set train.ema=none), or {_BEGIN}",
        )
    more = [name for name in map(average_name, weights) if name in tensors and name not in averages.values()]
    if more and not averages:
        raise MbcError(
            "MBC212",
            f"'{path}' has moving averages, but the network keeps none ({len(more)} names, such as {more[0]})",
            f"compile with moving averages, like the file (--set train.ema=RATE), or {_BEGIN}",
        )


def fit_weights(given: object, states: Mapping[str, tuple[int, ...]], weights: Collection[str]) -> dict[str, Array]:
    """Return the arrays of a state dict by name: all states, or the `weights` alone.

    Args:
        given: The argument of `Module.load_state_dict`.
        states: Shape of each state of the network.
        weights: Names of the weights.

    Raises:
        MbcError: MBC164 (every missing, unexpected and mismatched name) and MBC165 (a value that NumPy cannot read).
    """
    if not isinstance(given, Mapping):
        raise MbcError(
            "MBC164", f"{shown(given)} is not a mapping of names to arrays", "pass what state_dict() returned"
        )
    arrays = {
        str(name): plain_array(str(name), array) for name, array in cast("Mapping[object, object]", given).items()
    }
    whole = any(name in states and name not in weights for name in arrays)
    expected = {name: (shape, FLOATING) for name, shape in states.items() if whole or name in weights}
    tensors = {name: Tensor(NAMES.get(array.dtype, str(array.dtype)), array.shape) for name, array in arrays.items()}
    _compare("the state dict", "the dict", expected, tensors, strict=True)
    return arrays


def _of_training(name: str, weights: Collection[str]) -> bool:
    """Return whether a tensor is no weight, but a counter, an optimizer state, or kept for an export.

    An optimizer state is named after its weight: `first.weight.momentum`.
    """
    return name not in weights and (name.startswith(("control.", KEPT)) or name.rpartition(".")[0] in weights)


def _compare(
    what: str,
    whose: str,
    expected: Mapping[str, tuple[tuple[int, ...], frozenset[str]]],
    tensors: Mapping[str, Tensor],
    strict: bool,
) -> None:
    """Compare the tensors of a file or dict with the states of the network.

    Raises:
        MbcError: MBC164 with every missing, unexpected and mismatched name.
    """
    lines: dict[str, str] = {}
    if strict:
        lines |= {n: f"missing     {n} {list(shape)}" for n, (shape, _) in expected.items() if n not in tensors}
        lines |= {n: f"unexpected  {n} {list(t.shape)}" for n, t in tensors.items() if n not in expected}
    for name, (shape, dtypes) in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            lines[name] = f"mismatched  {name}: the network has {list(shape)}, {whose} {list(tensor.shape)}"
        elif tensor is not None and tensor.dtype not in dtypes:
            kind = "floating-point numbers" if dtypes is FLOATING else "integers"
            lines[name] = f"mismatched  {name}: the network has {kind}, {whose} {tensor.dtype}"
    if lines:
        listed = "\n  ".join(lines.values())
        weights = {*expected, *tensors}
        raise MbcError(
            "MBC164",
            f"{what} does not fit the network ({len(lines)} names):\n  {listed}",
            f"the optimizer, or which parameters are frozen, has changed: {_BEGIN}"
            if all(name.rpartition(".")[0] in weights for name in lines)
            else "load it into the network to which it belongs",
        )
