"""Libraries of generated kernels are compiled once, many kernels at a time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from mbc.codegen.launch_headers import write_launch_headers
from mbc.codegen.render_sources import render_generated
from mbc.ir.types import Precision
from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.cuda.generated.lowering import lower
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.measure.generated_libraries import GeneratedLibraries
from mbc.resources import folder
from tests.kernels.cuda.random_groups import random_group
from tests.objects import shared_library

GXX = shutil.which("g++")
EMULATOR = Path(__file__).parents[1] / "kernels" / "cuda" / "emulator"


@pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
def test_a_kernel_is_compiled_once(tmp_path: Path):
    built: list[tuple[MapProgram, ...]] = []

    def build(programs: Sequence[MapProgram], path: Path) -> None:
        assert GXX is not None
        built.append(tuple(programs))
        write_launch_headers(tmp_path)
        templates = folder("templates")
        for program in programs:
            (tmp_path / program.file).write_text(render_generated(program))
        include = [
            EMULATOR,
            *(templates / name for name in ("include", "kernels/shared", "kernels/generated")),
            tmp_path,
        ]
        sources = [*(tmp_path / program.file for program in programs), templates / "generated_library.cpp"]
        shared_library((GXX,), sources, include, DTYPE_CODES["bf16"], path)

    requests = [case.request(Precision.BF16) for seed in range(8) if (case := random_group(seed)) is not None]
    first, second, third = [lowered.program for request in requests if (lowered := lower(request)) is not None][:3]
    libraries = GeneratedLibraries(build)
    libraries.add((first, second, first))
    libraries.limit(7)
    assert libraries.function(first).__name__ == first.symbol
    assert libraries.function(third).__name__ == third.symbol
    libraries.add((first, second, third))
    assert built == [(first, second), (third,)]
