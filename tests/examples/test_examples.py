"""Every example at its full size, and trained by the CPU at a small size.

At full size each plan is sound, tight and reproducible, survives its file, and agrees with the generated host code. The
training at a small size checks the owner of every byte.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.hardware.streams import Stream
from mbc.ir.types import DType
from mbc.optimize.effort import CONCURRENT_MAX_ARENA
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.module import Module
from mbc.source import Source
from tests.codegen.fakes import PROGRAMS, as_planned, expected_log, run_against_fake
from tests.frontend.test_examples import EXAMPLES, SMALL

NAMES = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.mbc"))
PRECISIONS = ("fp32", "bf16")
ARENA_OVER_LIVE = 1.02  # what the placement may lose, as a share of peak live bytes

# The plan of another process, with another order of sets and of anything else that hashes strings.
AGAIN = """
import sys
from dataclasses import replace
from tests.examples.test_examples import plan_of
from mbc.plan.file import dump_plan
sys.stdout.reconfigure(newline="")
sys.stdout.write(dump_plan(plan_of(*sys.argv[1:])))
"""


@functools.lru_cache(maxsize=1)
def plan_of(name: str, *settings: str) -> Plan:
    pairs = tuple((s.partition("=")[0], s.partition("=")[2]) for s in settings)
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    return compile_plan(Source(name, text), Options(gpu="h200", settings=pairs))


def planned(quick: int) -> list[object]:
    """Return a test parameter for every example in every precision.

    `make test` runs only `quick` of the examples, each in one precision, in turn; 0 means all examples. The tests of a
    plan share a worker, which then compiles the plan once (`--dist loadgroup`).
    """
    parameters: list[object] = []
    for i, name in enumerate(NAMES):
        for j, precision in enumerate(PRECISIONS):
            marks = [pytest.mark.xdist_group(f"{name} {precision}")]
            if (i + j) % len(PRECISIONS) or (quick and i >= quick):
                marks.append(pytest.mark.exhaustive)
            parameters.append(pytest.param(name, precision, marks=marks))
    return parameters


every_plan = pytest.mark.parametrize(("name", "precision"), planned(0))


def most_bytes(plan: Plan) -> float:
    """Return the largest size of the arena that passes. Buffers that the concurrent stream uses live longer."""
    beside = any(launch.stream is Stream.CONCURRENT for launch in plan.train.launches)
    return (CONCURRENT_MAX_ARENA if beside else 1) * ARENA_OVER_LIVE * plan.bounds.live_bytes


@every_plan
def test_plan_is_sound_and_tight(name: str, precision: str) -> None:
    plan = plan_of(name, f"train.precision={precision}")
    verified = verify_plan(plan)
    assert verified.arena_bytes == plan.predictions.arena_bytes
    assert verified.live_bytes == plan.bounds.live_bytes
    assert verified.arena_bytes <= most_bytes(plan)


@every_plan
def test_plan_survives_its_file(name: str, precision: str) -> None:
    plan = plan_of(name, f"train.precision={precision}")
    text = dump_plan(plan)
    again = load_plan(text, "plan.json")
    assert replace(again, graph=plan.graph) == plan  # the graph's places are in files, whose folders are not kept
    assert dump_plan(again) == text


@every_plan
def test_host_code_makes_the_planned_calls(name: str, precision: str, tmp_path: Path) -> None:
    plan = plan_of(name, f"train.precision={precision}")
    run = run_against_fake(plan, tmp_path)
    for program in PROGRAMS:
        expected = expected_log(plan, program)
        assert as_planned(run.eager[program]) == expected
        assert as_planned(run.captured[program]) == expected


@pytest.mark.parametrize(("name", "precision"), planned(3))
def test_another_process_plans_the_same_bytes(name: str, precision: str) -> None:
    setting = f"train.precision={precision}"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, name, setting],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        check=True,
    )
    # Compared outside of the assert, because rendering a difference of megabytes would take long.
    same = done.stdout == dump_plan(plan_of(name, setting)).encode()
    assert same


@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_the_cpu(name: str) -> None:
    plan = plan_of(name, "train.precision=fp32", *SMALL[name])
    module = Module(plan, device="cpu", shadow=True)
    generator = np.random.default_rng(0)
    arrays: list[np.ndarray] = []
    for value in plan.graph.inputs:
        kind = plan.graph.values[value].type
        if kind.dtype is DType.INT32:
            arrays.append(generator.integers(0, 3, kind.shape).astype(np.int32))
        else:
            arrays.append(generator.standard_normal(kind.shape).astype(np.float32))
    losses = [float(module.step(*arrays, lr=0.001)) for _ in range(2)]
    assert all(map(math.isfinite, losses))
    assert losses[0] != losses[1]
    logits = module.forward(arrays[0])
    assert isinstance(logits, np.ndarray)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("depth", [34, *(pytest.param(d, marks=pytest.mark.exhaustive) for d in (50, 101, 152))])
def test_resnets_of_every_depth_compile(depth: int) -> None:
    plan = plan_of("resnet.mbc", f"depth={depth}")
    assert verify_plan(plan).arena_bytes <= most_bytes(plan)
