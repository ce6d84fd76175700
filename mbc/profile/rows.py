"""Measurements that are made of their rows when they are asked for: a profile has tens of thousands, of which a plan
needs few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mbc.profile.model import Measurement
from mbc.profile.schema import Kernel, Row, kernel_of, measurement_of, row_of


class LazyMeasurements(Mapping[str, tuple[Measurement, ...]]):
    """By the signature of their request. `rows`: that `mbc.profile.schema.check_rows` lets pass; `made`: measurements
    of some requests, whatever their rows say."""

    def __init__(
        self, rows: Mapping[str, Sequence[Row]], made: Mapping[str, tuple[Measurement, ...]] | None = None
    ) -> None:
        self._rows, self._made = rows, dict(made or {})

    @staticmethod
    def of(measurements: Mapping[str, tuple[Measurement, ...]]) -> LazyMeasurements:
        """The same measurements."""
        if isinstance(measurements, LazyMeasurements):
            return measurements
        return LazyMeasurements({key: tuple(map(row_of, found)) for key, found in measurements.items()}, measurements)

    def __getitem__(self, key: str) -> tuple[Measurement, ...]:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = tuple(map(measurement_of, self._rows[key]))
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def kernels(self, key: str) -> Iterator[Kernel]:
        """Those that the measurements of a request are of, none of which is made for it."""
        return (kernel_of(row) for row in self._rows[key])

    def replaced(self, made: Mapping[str, tuple[Measurement, ...]]) -> LazyMeasurements:
        """With other measurements of some requests, of which those that have none any more are left out."""
        rows = {key: rows for key, rows in self._rows.items() if made.get(key, rows)}
        return LazyMeasurements(rows, {**self._made, **made})
