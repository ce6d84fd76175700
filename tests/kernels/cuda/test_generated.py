"""Kernels that are generated from device expressions: against NumPy, and that equal programs are one kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import pytest

from mbc.codegen.launch_headers import write_launch_headers
from mbc.codegen.render_sources import render_generated
from mbc.ir.types import Precision
from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.cuda.generated.lowering import lower, members_of
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.resources import folder
from tests.kernels.cuda.cases import GENERATED, Case
from tests.kernels.cuda.launching import DRAWS, HostMemory, Library, Trial, judged
from tests.kernels.cuda.random_groups import KINDS_DRAWN, random_group
from tests.kernels.cuda.test_emulated import EMULATOR, GXX
from tests.objects import shared_library

pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16)
EXHAUSTIVE = pytest.mark.exhaustive


def programs(cases: Iterable[Case], precision: Precision) -> dict[str, MapProgram]:
    """Return the programs of those cases for which a kernel can be generated, by name."""
    lowered = (lower(case.request(precision)) for case in cases)
    return {one.program.name: one.program for one in lowered if one is not None}


def drawn(fewest: int = 60, most: int = 600) -> tuple[Case, ...]:
    """Return groups of the first seeds, with which kernels of every kind that can be generated are generated."""
    groups, missing = list[Case](), set(KINDS_DRAWN)
    for seed in range(most):
        if seed >= fewest and not missing:
            break
        group = random_group(seed)
        if group is None or (seed >= fewest and not missing & kinds_generated(group)):
            continue
        groups.append(group)
        missing -= kinds_generated(group)
    return tuple(groups)


def kinds_generated(case: Case) -> set[str]:
    """Return the kinds of operations in the kernel that is generated for a case; none if there is no such kernel."""
    request = case.request(Precision.BF16)
    return {member.kind for member in members_of(request)} if lower(request) else set()


DRAWN = drawn()


def build_generated(where: Path, precision: Precision, generated: dict[str, MapProgram]) -> Library:
    """Return a library of all kernels, which are in one file because that compiles faster than a file for each."""
    assert GXX is not None
    lines: list[str] = []
    for name, program in generated.items():
        (where / program.file).write_text(render_generated(program))
        lines += [f"#define Generated Generated_{name}", f'#include "{program.file}"', "#undef Generated"]
    (where / "all.cu").write_text("\n".join(lines) + "\n")
    write_launch_headers(where)
    templates = folder("templates")
    include = [where, EMULATOR, templates / "include", templates / "kernels/shared", templates / "kernels/generated"]
    result = where / "kernels.so"
    shared_library((GXX,), [where / "all.cu"], include, DTYPE_CODES[precision], result)
    return Library(ctypes.CDLL(str(result)), HostMemory())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[Precision, Library]:
    return {p: build_generated(tmp_path_factory.mktemp(p), p, programs((*DRAWN, *GENERATED), p)) for p in PRECISIONS}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", (*DRAWN, *GENERATED), ids=lambda case: case.name)
def test_a_drawn_group_or_a_function(case: Case, precision: Precision, libraries: dict[Precision, Library]):
    library = libraries[precision]
    trials = (Trial(library, case, precision, draw) for draw in range(DRAWS))
    trial = next((trial for trial in trials if not trial.is_unsteady()), Trial(library, case, precision))
    _, failures = judged(trial)
    assert not failures, f"{case.name}, {case.kind} in {precision}: " + "; ".join(failures)


def test_every_kind_with_an_expression_is_drawn():
    assert {kind for case in DRAWN for kind in kinds_generated(case)} == set(KINDS_DRAWN)
