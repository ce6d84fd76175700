"""Two GPUs as two machines: predicted beside measured collectives, without the GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import two_machines

from mbc.hardware.collective_times import CollectiveKind, CollectiveTime, Link
from mbc.hardware.topology import link_between
from mbc.measure.collective_fleet import Measured
from mbc.measure.collective_timing import MIB, SIZES_BYTES


def times(sizes: Sequence[int], ctas: Sequence[int], slower: float = 1.0) -> Iterator[CollectiveTime]:
    """Yield times of a network of 20 Gb/s and 50 us."""
    for kind in CollectiveKind:
        for max_ctas in ctas:
            for size_bytes in sizes:
                time_us = slower * (50.0 + size_bytes / 2.5e3)
                yield CollectiveTime(kind, 2, Link.SOCKET, max_ctas, size_bytes, time_us, time_us)


@pytest.mark.parametrize(("slower", "passes"), [(1.0, True), (1.3, False)])
def test_times_between_measured_sizes_are_predicted(slower: float, passes: bool) -> None:
    first = list(times(SIZES_BYTES, two_machines.FIRST_CTAS))
    rows = two_machines.rows_of(first, list(times(two_machines.SECOND_SIZES, (4, 8), slower)), 20.0)
    assert len(rows) == 3 * 2 * len(two_machines.SECOND_SIZES)
    large = [row for row in rows if "passed" in row]
    assert {row["name"].split()[0] for row in large} == {"all_reduce"} and len(large) == 2 * 4
    assert all(row["passed"] is passes for row in large)
    assert large[-1]["by_rate_us"] == pytest.approx(40 + 128 * MIB / (20 / 8 * 0.9 * 1e3))


def test_both_runs_use_sockets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def measured(gpus: Sequence[str], path: Path, tell: object, **options: Any) -> Measured:
        asked.append({"gpus": gpus, **options})
        return Measured(tuple(times(options["sizes_bytes"], options["max_ctas"])))

    monkeypatch.setattr(two_machines, "measure_collectives", measured)
    first, second = two_machines.measure(["0", "1"], print)
    assert [run["sizes_bytes"] for run in asked] == [SIZES_BYTES, two_machines.SECOND_SIZES]
    assert len(first) == 3 * 2 * len(SIZES_BYTES) and not {t.size_bytes for t in first} & {t.size_bytes for t in second}
    assert link_between(["a", "b"], two_machines.AS_TWO_MACHINES) is Link.SOCKET


def test_the_rate_of_one_connection_is_measured() -> None:
    assert 0.01 < two_machines.connection_gbit(8 << 20) < 10_000
