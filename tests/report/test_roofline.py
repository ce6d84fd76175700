from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mbc.analysis.roofline import Bound, ceilings_of, device_of, limits
from mbc.hardware.streams import COPY_STREAMS
from mbc.optimize.bounds.measured_floor import Floor
from mbc.report.roofline import roofline_document, roofline_text
from mbc.units import show_time
from tests.report.plans import PLANS
from tests.runtime.nets import small_plan

FLOOR = Floor(1500.0, 3, 500.0, 1, 4 << 20, 1000.0)


def test_the_page():
    text = roofline_text(small_plan(), FLOOR, width=160)
    for word in (
        "ceilings (measured): 4,300 GB/s of copying, 263 TFLOP/s of fp32, emulated by 3 fp16 tensor-core products each",
        "time / limit", "lost",
        "first.backward_filter", "memory", "speed of light", "floor of the network", "2.50 ms", "4.00 MiB",
        "3 convolutions and GEMMs, 1 of them estimated", "share of loss", "gaps",
    ):  # fmt: skip
        assert word in text, word


def test_less_of_it():
    whole = roofline_text(small_plan(), FLOOR, width=160)
    few = roofline_text(small_plan(), FLOOR, width=160, limit=2)
    kinds = roofline_text(small_plan(), None, width=160, by_kind=True)
    infer = roofline_text(small_plan(), None, width=160, infer=True)
    assert len(kinds.splitlines()) < len(few.splitlines()) < len(whole.splitlines())
    assert "operations that lose less" in few and "first.backward_filter" not in kinds
    assert "floor of the network" not in kinds and infer.startswith("small: inference")
    assert max(map(len, roofline_text(small_plan(), FLOOR, width=100).splitlines()[5:20])) <= 100


def test_for_a_script():
    plan = small_plan()
    document = json.loads(json.dumps(roofline_document(plan, FLOOR)))
    bounds = limits(plan, plan.train, ceilings_of(plan))
    assert document["floor"]["total_us"] == 2500.0
    least = sum(max(row["memory_us"], row["arithmetic_us"]) for row in document["operations"])
    assert document["limit_us"] == pytest.approx(least)
    assert document["time_us"] == pytest.approx(sum(kind["time_us"] for kind in document["kinds"]))
    assert [row["name"] for row in document["operations"]] == [one.summary.name for one in bounds]
    assert {row["bound"] for row in document["operations"]} <= {"memory", "arithmetic"}
    assert roofline_document(plan, None, infer=True)["floor"] is None


def test_a_group_with_one_estimate_is_estimated():
    plan = small_plan()
    launches = (
        replace(launch, work=replace(launch.work, measured=True)) if launch.operations == ("first",) else launch
        for launch in plan.train.launches
    )
    plan = replace(plan, train=replace(plan.train, launches=tuple(launches)))
    document = roofline_document(plan, None)
    for rows, is_estimated in ("operations", [False, True]), ("kinds", [True]):
        assert [row["estimated"] for row in document[rows] if row["kind"] == "convolution"] == is_estimated
    lines = roofline_text(plan, None, width=160, by_kind=True).splitlines()
    for words, mark in ("convolution  ", True), ("guard  ", False), ("all  ", True), ("all kernels, serially", True):
        (line,) = (line for line in lines if line.startswith(words))
        assert ("~" in line) == mark, line


def test_copies_are_limited_by_their_link_and_beside_the_kernels():
    plan = PLANS["offloaded"]()
    bounds = limits(plan, plan.train, ceilings_of(plan))
    copies = [one for one in bounds if one.summary.stream in COPY_STREAMS]
    links = device_of(plan).links
    for one in copies:
        assert one.bound is Bound.LINK and one.limit_us < one.summary.time_us, "but for the latency"
        assert one.limit_us == one.moved_bytes / (1e3 * links.gb_s(one.summary.stream))
    assert max(one.limit_us / one.summary.time_us for one in copies) > 0.9
    kernels_us = sum(one.summary.time_us for one in bounds if one not in copies)
    text = roofline_text(plan, None, width=160)
    (row,) = (line for line in text.splitlines() if line.startswith("all kernels, serially"))
    assert show_time(kernels_us) in row
    assert row.endswith(f"copies take {show_time(sum(one.summary.time_us for one in copies))} beside them")
    (row,) = (line for line in text.splitlines() if line.startswith("all kernels  "))
    assert show_time(kernels_us) in row
