"""The number that a step returns: a float that is fetched from the device when somebody looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from mbc.runtime.machine import Figures
from mbc.runtime.reported_metrics import ACCURACY


class Loss:
    """Behaves as a float. Looking at it waits for its step; not looking leaves the device running ahead.

    `judged`: the metrics that follow it in `figures`, and what each is divided by (`mbc.runtime.reported_metrics`).
    `mini_batches`: over how many of them `figures` are sums.
    """

    __slots__ = ("_figures", "_judged", "_mini_batches")

    def __init__(
        self, figures: Figures, judged: Mapping[str, int] = MappingProxyType({}), mini_batches: int = 1
    ) -> None:
        self._figures, self._judged, self._mini_batches = figures, judged, mini_batches

    def item(self) -> float:
        """The value as a plain float."""
        return self._figures.values[0] / self._mini_batches

    @property
    def accuracy(self) -> float | None:
        """Share of the step's rows that were classified correctly; None where nothing is classified. With several
        losses, that of the first that classifies."""
        return self.metrics.get(ACCURACY)

    @property
    def metrics(self) -> dict[str, float]:
        """What the step reports beside its loss: `accuracy`, and the metrics of the source by their names."""
        found = zip(self._judged.items(), self._figures.values[1:], strict=True)
        return {name: value / judged for (name, judged), value in found}

    @property
    def idle_s(self) -> float | None:
        """Seconds for which the GPU had nothing to do between the step before and this one, because it was called late.
        None on the CPU, which computes within the call, of a module's first step, and where it was looked at so late
        that it is no longer known."""
        return self._figures.idle_s

    def __float__(self) -> float:
        return self.item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.item(), dtype)

    def __repr__(self) -> str:
        return repr(self.item())

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __hash__(self) -> int:
        return hash(self.item())

    def __eq__(self, other: object) -> bool:
        return self.item() == (float(other) if isinstance(other, Loss) else other)

    def __lt__(self, other: SupportsFloat) -> bool:
        return self.item() < float(other)

    def __le__(self, other: SupportsFloat) -> bool:
        return self.item() <= float(other)

    def __gt__(self, other: SupportsFloat) -> bool:
        return self.item() > float(other)

    def __ge__(self, other: SupportsFloat) -> bool:
        return self.item() >= float(other)

    def __add__(self, other: SupportsFloat) -> float:
        return self.item() + float(other)

    def __radd__(self, other: SupportsFloat) -> float:
        return float(other) + self.item()

    def __sub__(self, other: SupportsFloat) -> float:
        return self.item() - float(other)

    def __rsub__(self, other: SupportsFloat) -> float:
        return float(other) - self.item()

    def __mul__(self, other: SupportsFloat) -> float:
        return self.item() * float(other)

    def __rmul__(self, other: SupportsFloat) -> float:
        return float(other) * self.item()

    def __truediv__(self, other: SupportsFloat) -> float:
        return self.item() / float(other)

    def __rtruediv__(self, other: SupportsFloat) -> float:
        return float(other) / self.item()

    def __neg__(self) -> float:
        return -self.item()

    def __abs__(self) -> float:
        return abs(self.item())

    def __round__(self, digits: int | None = None) -> float:
        return round(self.item(), digits)
