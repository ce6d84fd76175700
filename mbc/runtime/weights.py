"""What a module keeps in a checkpoint: its states, and the counters of its control block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.runtime.checkpoint import FLOATING, INTEGERS, Checkpoint, Tensor

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Counter:
    """A field of the control block: its type in a checkpoint, and the largest value that the block has room for."""

    dtype: type[np.int64 | np.float32]
    largest: float

    def allows(self, value: Any) -> bool:
        least = 0 if self.dtype is np.int64 else np.finfo(np.float32).tiny
        return bool(math.isfinite(value) and least <= value <= self.largest)


_LONG, _SHORT = Counter(np.int64, (1 << 63) - 1), Counter(np.int64, (1 << 32) - 1)
COUNTERS: dict[str, Counter] = {
    "step": _LONG, "seed": _LONG, "updates": _SHORT, "skipped": _SHORT, "since_growth": _SHORT,
    "loss_scale": Counter(np.float32, float(np.finfo(np.float32).max)),
}  # fmt: skip


def counter_tensors(control: Array) -> list[tuple[str, Array]]:
    """The counters of a control record, as tensors of a checkpoint."""
    return [(f"control.{name}", control[name].astype(kind.dtype).reshape(1)) for name, kind in COUNTERS.items()]


def read_weights(
    path: Path, states: Mapping[str, tuple[int, ...]], strict: bool
) -> tuple[dict[str, Array], dict[str, Any]]:
    """States and counters of a file. `strict=False` takes what there is of them.

    Raises MBC163 (no whole file, or counters out of range) and MBC164 (every missing, unexpected and mismatched name).
    """
    checkpoint = Checkpoint(path)
    found = checkpoint.tensors
    expected = {name: (shape, FLOATING) for name, shape in states.items()}
    counters = {f"control.{name}": name for name in COUNTERS}
    for tensor, name in counters.items():
        expected[tensor] = ((1,), INTEGERS if COUNTERS[name].dtype is np.int64 else FLOATING)
    _compare(str(path), expected, found, strict)
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


def _compare(
    path: str,
    expected: Mapping[str, tuple[tuple[int, ...], frozenset[str]]],
    found: Mapping[str, Tensor],
    strict: bool,
) -> None:
    """MBC164 with every missing, unexpected and mismatched name."""
    lines: list[str] = []
    if strict:
        lines += [f"missing     {name} {list(shape)}" for name, (shape, _) in expected.items() if name not in found]
        lines += [f"unexpected  {name} {list(t.shape)}" for name, t in found.items() if name not in expected]
    for name, (shape, dtypes) in expected.items():
        tensor = found.get(name)
        if tensor is not None and tensor.shape != shape:
            lines.append(f"mismatched  {name}: the network has {list(shape)}, the file {list(tensor.shape)}")
        elif tensor is not None and tensor.dtype not in dtypes:
            kind = "floating-point numbers" if dtypes is FLOATING else "integers"
            lines.append(f"mismatched  {name}: the network has {kind}, the file {tensor.dtype}")
    if lines:
        listed = "\n  ".join(lines)
        raise MbcError(
            "MBC164",
            f"'{path}' does not fit the network ({len(lines)} names):\n  {listed}",
            "load it into the network that it was saved from",
        )
