"""Measurements that are decoded from their rows only when needed: a profile has tens of thousands, a plan needs few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mbc.profile.model import Measurement
from mbc.profile.schema import Kernel, Row, kernel_of, measurement_of, row_of


class LazyMeasurements(Mapping[str, tuple[Measurement, ...]]):
    """Measurements by the signature of their request."""

    def __init__(
        self, rows: Mapping[str, Sequence[Row]], measurements: Mapping[str, tuple[Measurement, ...]] | None = None
    ) -> None:
        """Store the rows.

        Args:
            rows: Rows that `mbc.profile.schema.check_rows` accepts.
            measurements: Measurements of some requests, which take precedence over their rows.
        """
        self._rows, self._measurements = rows, dict(measurements or {})

    @staticmethod
    def of(measurements: Mapping[str, tuple[Measurement, ...]]) -> LazyMeasurements:
        """Return `measurements` as lazy ones."""
        if isinstance(measurements, LazyMeasurements):
            return measurements
        return LazyMeasurements({key: tuple(map(row_of, held)) for key, held in measurements.items()}, measurements)

    def __getitem__(self, key: str) -> tuple[Measurement, ...]:
        """Return the measurements of a request."""
        measurements = self._measurements.get(key)
        if measurements is None:
            measurements = self._measurements[key] = tuple(map(measurement_of, self._rows[key]))
        return measurements

    def __contains__(self, key: object) -> bool:
        """Return whether a request has measurements, without decoding them."""
        return key in self._rows

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the signatures."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._rows)

    def kernels(self, key: str) -> Iterator[Kernel]:
        """Return the kernels of a request's measurements, which are not decoded for it."""
        return (kernel_of(row) for row in self._rows[key])

    def replaced(self, changed: Mapping[str, tuple[Measurement, ...]]) -> LazyMeasurements:
        """Return a copy with `changed` measurements of some requests; requests without any are left out."""
        rows = {key: rows for key, rows in self._rows.items() if changed.get(key, rows)}
        return LazyMeasurements(rows, {**self._measurements, **changed})
