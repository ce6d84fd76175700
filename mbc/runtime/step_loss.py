"""The loss that a step returns: a float that is fetched from the device when the caller reads it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from mbc.runtime.machine import Figures
from mbc.runtime.reported_metrics import ACCURACY


class Loss:
    """The loss of one step, which behaves as a float.

    Reading it waits for the step. As long as nothing is read, the device runs ahead of the program.
    """

    __slots__ = ("_figures", "_judged", "_mini_batches")

    def __init__(
        self, figures: Figures, judged: Mapping[str, int] = MappingProxyType({}), mini_batches: int = 1
    ) -> None:
        """Hold the figures of a step without fetching them.

        Args:
            figures: The loss, then the metrics.
            judged: The divisor of each metric by its name, in the order of `figures` (`mbc.runtime.reported_metrics`).
            mini_batches: Number of mini-batches over which `figures` are sums.
        """
        self._figures, self._judged, self._mini_batches = figures, judged, mini_batches

    def item(self) -> float:
        """Return the loss as a plain float."""
        return self._figures.values[0] / self._mini_batches

    @property
    def accuracy(self) -> float | None:
        """Share of the step's rows that were classified correctly; None if no loss classifies.

        If several losses classify, it is the accuracy of the first one in the source.
        """
        return self.metrics.get(ACCURACY)

    @property
    def metrics(self) -> dict[str, float]:
        """The step's metrics by name: `accuracy`, and the metrics of the source."""
        pairs = zip(self._judged.items(), self._figures.values[1:], strict=True)
        return {name: value / judged for (name, judged), value in pairs}

    @property
    def idle_s(self) -> float | None:
        """Seconds for which the GPU was idle between the step before and this one, because this step was called late.

        It is None on the CPU, which computes within the call; for a module's first step; and if it is read so late that
        the time of the step before is no longer available.
        """
        return self._figures.idle_s

    def __float__(self) -> float:
        """Return the loss as a plain float."""
        return self.item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the loss as a NumPy array without axes."""
        return np.asarray(self.item(), dtype)

    def __repr__(self) -> str:
        """Return the text of the plain float."""
        return repr(self.item())

    def __format__(self, specification: str) -> str:
        """Return the text of the plain float in a format."""
        return format(self.item(), specification)

    def __bool__(self) -> bool:
        """Return whether the loss is not 0."""
        return bool(self.item())

    def __hash__(self) -> int:
        """Return the hash of the plain float."""
        return hash(self.item())

    def __eq__(self, other: object) -> bool:
        """Return whether the loss equals a number or another loss."""
        return self.item() == (float(other) if isinstance(other, Loss) else other)

    def __lt__(self, other: SupportsFloat) -> bool:
        """Return whether the loss is less than a number."""
        return self.item() < float(other)

    def __le__(self, other: SupportsFloat) -> bool:
        """Return whether the loss is at most a number."""
        return self.item() <= float(other)

    def __gt__(self, other: SupportsFloat) -> bool:
        """Return whether the loss is greater than a number."""
        return self.item() > float(other)

    def __ge__(self, other: SupportsFloat) -> bool:
        """Return whether the loss is at least a number."""
        return self.item() >= float(other)

    def __add__(self, other: SupportsFloat) -> float:
        """Return the sum of the loss and a number."""
        return self.item() + float(other)

    def __radd__(self, other: SupportsFloat) -> float:
        """Return the sum of a number and the loss."""
        return float(other) + self.item()

    def __sub__(self, other: SupportsFloat) -> float:
        """Return the loss less a number."""
        return self.item() - float(other)

    def __rsub__(self, other: SupportsFloat) -> float:
        """Return a number less the loss."""
        return float(other) - self.item()

    def __mul__(self, other: SupportsFloat) -> float:
        """Return the product of the loss and a number."""
        return self.item() * float(other)

    def __rmul__(self, other: SupportsFloat) -> float:
        """Return the product of a number and the loss."""
        return float(other) * self.item()

    def __truediv__(self, other: SupportsFloat) -> float:
        """Return the loss divided by a number."""
        return self.item() / float(other)

    def __rtruediv__(self, other: SupportsFloat) -> float:
        """Return a number divided by the loss."""
        return float(other) / self.item()

    def __neg__(self) -> float:
        """Return the negative of the loss."""
        return -self.item()

    def __abs__(self) -> float:
        """Return the absolute value of the loss."""
        return abs(self.item())

    def __round__(self, digits: int | None = None) -> float:
        """Return the loss rounded to some decimal digits."""
        return round(self.item(), digits)
