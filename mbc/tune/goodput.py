"""The table of mini-batches: planned images/s, statistical efficiency, and their product, goodput.

Goodput as in Pollux (Qiao et al., OSDI 2021) is images/s times statistical efficiency: how many images of the base
batch a second would give equal progress. The mini-batch with the highest goodput is expected to reach any loss first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.fit import Probe
from mbc.tune.noise_scale import efficiency
from mbc.tune.rates import rate_factor, rescaled


@dataclass(frozen=True, slots=True)
class Tried:
    """A mini-batch of `probe.at` rows on a number of GPUs."""

    gpus: int
    probe: Probe


@dataclass(frozen=True, slots=True)
class Row:
    """One mini-batch of the table.

    Attributes:
        gpus: Number of GPUs.
        probe: Rows of the mini-batch on all GPUs, and its plan's figures if it fits.
        rows: Rows of a step.
        efficiency: Progress of a row, relative to a row of the base batch; 1 if no noise scale is known, 0 if the batch
            does not fit.
        goodput: Images of the base batch a second with equal progress; 0 if the batch does not fit.
        rate: Learning rate; None if it is unknown or the batch does not fit.
        momentum: Momentum to train with at this rate; None if the rate is unknown.
    """

    gpus: int
    probe: Probe
    rows: int
    efficiency: float
    goodput: float
    rate: float | None
    momentum: float | None = None

    @property
    def batch(self) -> int:
        """Rows of the mini-batch on all GPUs."""
        return self.probe.at

    def epochs(self, base_epochs: int, base: Base, data_rows: int | None) -> int:
        """Return the epochs that make as much progress as `base_epochs` at the base batch.

        A smaller batch gets no fewer epochs than the base batch. An epoch leaves out rows that do not fill a step: up
        to half of the rows, if the batch is large.

        Args:
            base_epochs: Epochs at the base batch.
            base: The base batch.
            data_rows: Rows of the data; None if unknown.
        """
        seen = 1.0 if data_rows is None else _whole(data_rows, self.rows) / _whole(data_rows, base.rows)
        return math.ceil(round(base_epochs / min(1.0, self.efficiency * seen), 6))


@dataclass(frozen=True, slots=True)
class Base:
    """The base batch, with which other mini-batches are compared.

    Attributes:
        rows: Rows of a step.
        accumulate: Mini-batches of a step.
        rate: Learning rate; None if unknown.
        rule: How the rate changes with the rows (`mbc.tune.rates`).
        momentum: Momentum of the source's optimizer; 0 if it has none.
    """

    rows: int
    accumulate: int
    rate: float | None
    rule: str
    momentum: float = 0.0


@dataclass(frozen=True, slots=True)
class Table:
    """All mini-batches, and the one that is taken.

    Attributes:
        rows: Mini-batches by GPUs and batch.
        taken: The one with the highest goodput; of equal ones the smaller batch on fewer GPUs.
        noise_scale: The gradient noise scale in rows; None if unknown.
    """

    rows: tuple[Row, ...]
    taken: Row
    noise_scale: float | None

    @property
    def fitting(self) -> tuple[Row, ...]:
        """The mini-batches that fit."""
        return tuple(row for row in self.rows if row.probe.figures is not None)


def table(tried: Iterable[Tried], base: Base, noise_scale: float | None) -> Table:
    """Return the table of mini-batches, of which at least one must fit.

    Args:
        tried: The mini-batches.
        base: The base batch.
        noise_scale: The gradient noise scale in rows. None: all rows count equally, and the highest images/s are taken.
    """
    rows = tuple(_row(one, base, noise_scale) for one in tried)
    fitting = [row for row in rows if row.probe.figures is not None]
    return Table(rows, max(fitting, key=lambda row: (row.goodput, -row.gpus, -row.batch)), noise_scale)


def _whole(data_rows: int, rows: int) -> int:
    """Return the rows of an epoch that fill steps, at least the rows of one step."""
    return max(1, data_rows // rows) * rows


def row_efficiency(noise_scale: float | None, base: Base, rows: int) -> float:
    """Return the statistical efficiency of steps with a number of rows; 1 if no noise scale is known."""
    return 1.0 if noise_scale is None else efficiency(noise_scale, base.rows, rows)


def _row(one: Tried, base: Base, noise_scale: float | None) -> Row:
    figures, rows = one.probe.figures, one.probe.at * base.accumulate
    if figures is None:
        return Row(one.gpus, one.probe, rows, 0.0, 0.0, None)
    row_value = row_efficiency(noise_scale, base, rows)
    factor = rate_factor(base.rule, noise_scale, base.rows, rows)
    settings = None, None
    if base.rate is not None and factor is not None:
        settings = rescaled(base.rule, factor, base.rate, base.momentum)
    return Row(one.gpus, one.probe, rows, row_value, figures.images_per_s * row_value, *settings)
