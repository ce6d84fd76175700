"""The launch of each node of a captured graph, as generated host code reports it, against the recording fakes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from mbc.codegen.view import view
from mbc.compiler import compile_plan
from mbc.ir.types import Precision
from mbc.options import Options
from mbc.plan.cut import ADD, parts_of
from mbc.runtime.library import PROGRAMS as PROGRAMS_OF_PLANS
from mbc.source import Source
from tests.codegen.fakes import ARENA, HOST, PROGRAMS, Call, compile_against_fake, loaded, parse_log
from tests.codegen.plans import providers, small_plan

TOLD = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)


def test_every_node_is_reported_with_its_launch(tmp_path: Path) -> None:
    """The fake numbers nodes in the order in which they are added, but lists them in another order.

    Some launches add several nodes: filter gradients in half precision are widened.
    """
    plan = small_plan(Precision.BF16)
    nodes: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(PROGRAMS))}

    @TOLD
    def tell(program: int, launch: int, node: int) -> None:
        nodes[program].append((node, launch))

    with loaded(compile_against_fake(view(plan, providers()), tmp_path), has_everything=True) as (lib, module):
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        assert lib.mbc_capture_told(module, tell) == 0, lib.mbc_last_error(module)
        log = lib.fake_log().decode()
    assert log.count("begin capture") == log.count("end capture") == len(PROGRAMS)
    several = False
    for number, name in enumerate(PROGRAMS):
        captured = log.split("begin capture\n")[number + 1].split("end capture\n")[0]
        expected: list[tuple[int, int]] = []
        launch = -1
        for line in captured.splitlines():
            if line.startswith("launch "):
                launch += 1
            if line.startswith(("launch ", "detail ")):
                expected.append((len(expected) + 1, launch))
        launches = getattr(plan, name).launches
        assert [entry for entry in parse_log(captured) if isinstance(entry, Call)] and launch + 1 == len(launches)
        assert sorted(nodes[number]) == expected
        several |= len(expected) > len(launches)
    assert several


@pytest.mark.parametrize("optimizer", ["none", "sgd accumulate = 2"])
def test_of_a_cut_program_the_halves_are_captured_and_replayed(tmp_path: Path, optimizer: str) -> None:
    source = f"""network net(batch = 2) {{ input image[batch, 3] : float  input g[batch, 5] : float
      y = image |> linear(5)  output y  loss (y, g) |> inner_product }}
    train {{ optimizer = {optimizer} }}"""
    plan = compile_plan(Source("net.mbc", source), Options(gpu="h200"))
    launches: list[tuple[int, int]] = []
    counts = {0: len(plan.train.launches), 1: len(plan.infer.launches)}
    if (part := parts_of(plan).get(ADD)) is not None:
        counts[PROGRAMS_OF_PLANS[ADD]] = len(part.launches)

    @TOLD
    def tell(program: int, launch: int, node: int) -> None:
        launches.append((program, launch))

    with loaded(compile_against_fake(view(plan), tmp_path), has_everything=True) as (lib, module):
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        assert lib.mbc_warm(module) == 0, lib.mbc_last_error(module)
        calls = [entry for entry in parse_log(lib.fake_log().decode()) if isinstance(entry, Call)]
        assert len(calls) == sum(counts.values())
        assert lib.mbc_capture_told(module, tell) == 0, lib.mbc_last_error(module)
        assert lib.fake_log().decode().count("begin capture") == 1 + len(counts)
        for program in counts:
            lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
            assert lib.mbc_run(module, program) == 0, lib.mbc_last_error(module)
            assert len(lib.fake_log().decode().splitlines()) == (1 if program else 2)
    assert set(launches) == {(program, launch) for program, count in counts.items() for launch in range(count)}


def test_a_failure_tells_of_nothing(tmp_path: Path) -> None:
    launches: list[int] = []

    @TOLD
    def tell(program: int, launch: int, node: int) -> None:
        launches.append(launch)

    with loaded(compile_against_fake(view(small_plan(), providers()), tmp_path), has_everything=True) as (lib, module):
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        lib.fake_fail_at(3)
        assert lib.mbc_capture_told(module, tell) == 1
        assert "launch 3" in lib.mbc_last_error(module).decode() and not launches
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        assert lib.mbc_capture_told(module, tell) == 0
        assert launches
