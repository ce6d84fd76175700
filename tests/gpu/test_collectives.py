"""Collectives between two GPUs: they are measured, and every rank closes its communicator within a time limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.hardware.collective_times import CollectiveKind, ConcurrentKernel
from mbc.measure.collective_fleet import link_of, measure_collectives
from mbc.measure.fleet import visible_gpus
from mbc.profile.read_profile import read_profile

MIB = 1 << 20


@pytest.mark.skipif(len(visible_gpus()) < 2, reason="needs two GPUs")
def test_measuring(tmp_path: Path):
    path, notes = tmp_path / "p.sqlite", list[str]()
    gpus = visible_gpus()[:2]
    measurement = measure_collectives(gpus, path, notes.append, max_ctas=(2, 16), sizes_bytes=(4, MIB, 64 * MIB))
    held = read_profile(path)
    assert set(held.collectives) == set(measurement.times) and len(measurement.times) == 2 * 3 * 3
    assert {s.kernel for s in held.collective_slowdowns} == set(ConcurrentKernel)
    model = held.collective_model(link_of(gpus))
    few, many = (model.cost(CollectiveKind.ALL_REDUCE, 64 * MIB, 2, ctas) for ctas in (2, 16))
    assert few.measured and many.measured and many.time_us < few.time_us
    assert all(0 < t.time_us < 1e6 and 0 < t.single_us < 1e6 for t in measurement.times)
    assert 0 < (held.collective_bytes(2) or 0) < 4096 * MIB
