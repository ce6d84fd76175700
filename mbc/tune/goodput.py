"""The table of mini-batches: images/s as planned, what a row is worth, and their product.

Goodput as in Pollux (Qiao et al., OSDI 2021): images/s times statistical efficiency, so images a
second at the worth that they have in the base batch. The batch that has most of it comes first to where any would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.fit import Probe
from mbc.tune.noise_scale import efficiency
from mbc.tune.rates import rate_factor


@dataclass(frozen=True, slots=True)
class Tried:
    """A mini-batch of `probe.at` rows on so many GPUs."""

    gpus: int
    probe: Probe


@dataclass(frozen=True, slots=True)
class Row:
    """One mini-batch: `batch` rows of all GPUs, `rows` a step takes. `efficiency` of a row beside one at the base batch
    (1 where no noise scale is known), `goodput` in images of the base batch a second, `rate` where it is known; 0 and
    None where the batch does not fit."""

    gpus: int
    probe: Probe
    rows: int
    efficiency: float
    goodput: float
    rate: float | None

    @property
    def batch(self) -> int:
        return self.probe.at

    def epochs(self, base_epochs: int, base: Base, data_rows: int | None) -> int:
        """That bring a training as far as `base_epochs` at the base batch do; of a smaller batch no fewer. Of the
        `data_rows` an epoch leaves out those that do not fill a step: of a large batch up to half of them."""
        seen = 1.0 if data_rows is None else _whole(data_rows, self.rows) / _whole(data_rows, base.rows)
        return math.ceil(round(base_epochs / min(1.0, self.efficiency * seen), 6))


@dataclass(frozen=True, slots=True)
class Base:
    """What other mini-batches are compared with: `rows` a step, of `accumulate` mini-batches; the rate, where it is
    known, and how it changes with the rows."""

    rows: int
    accumulate: int
    rate: float | None
    rule: str


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` by GPUs and batch; `taken` has most goodput, of equals the smaller batch on fewer GPUs."""

    rows: tuple[Row, ...]
    taken: Row
    noise_scale: float | None

    @property
    def fitting(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.probe.figures is not None)


def table(tried: Iterable[Tried], base: Base, noise_scale: float | None) -> Table:
    """Of at least one mini-batch that fits. `noise_scale` in rows, None where it is not known: then all rows count as
    much, and most images/s are taken."""
    rows = tuple(_row(one, base, noise_scale) for one in tried)
    fitting = [row for row in rows if row.probe.figures is not None]
    return Table(rows, max(fitting, key=lambda row: (row.goodput, -row.gpus, -row.batch)), noise_scale)


def _whole(data_rows: int, rows: int) -> int:
    """Rows of an epoch that fill steps; of a step at least."""
    return max(1, data_rows // rows) * rows


def row_worth(noise_scale: float | None, base: Base, rows: int) -> float:
    """Statistical efficiency of steps of so many rows; 1 where it is not known."""
    return 1.0 if noise_scale is None else efficiency(noise_scale, base.rows, rows)


def _row(one: Tried, base: Base, noise_scale: float | None) -> Row:
    figures, rows = one.probe.figures, one.probe.at * base.accumulate
    if figures is None:
        return Row(one.gpus, one.probe, rows, 0.0, 0.0, None)
    worth = row_worth(noise_scale, base, rows)
    factor = rate_factor(base.rule, noise_scale, base.rows, rows)
    rate = None if base.rate is None or factor is None else base.rate * factor
    return Row(one.gpus, one.probe, rows, worth, figures.images_per_s * worth, rate)
