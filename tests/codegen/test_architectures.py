"""Sources compile for every architecture that mbc plans for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mbc.codegen.build import _copy_sources
from mbc.codegen.objects import code_option
from mbc.codegen.render_sources import every_kernel_file
from mbc.codegen.toolchain import find_toolchain
from mbc.hardware.datasheet import MULTIPROCESSORS, OLDEST_CAPABILITY

NVCC = find_toolchain().nvcc
ARCHITECTURES = [f"sm_{capability}" for capability in MULTIPROCESSORS if capability >= OLDEST_CAPABILITY]
# Sources whose instructions depend on the architecture: tensor cores, asynchronous copies, wgmma.
SOURCES = ("attention_mma.cu", "conv1x1.cu", "tf32_filter_gradient.cu", "relu_mask.cu")
PAIRS = [(architecture, source) for architecture in ARCHITECTURES for source in SOURCES]
USUAL = [("sm_120", "relu_mask.cu")]  # one that `make test` compiles


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    ("architecture", "source"),
    [*USUAL, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in PAIRS if pair not in USUAL)],
)
def test_sources_compile(tmp_path: Path, architecture: str, source: str) -> None:
    _copy_sources((), tuple(every_kernel_file()), tmp_path)
    option = code_option(architecture, source)
    command = [
        str(NVCC),
        "-std=c++17",
        "-O0",
        "-Xptxas",
        "-O0",
        option,
        "-DMBC_WORKING=2",
        "-I.",
        "-Xcompiler",
        "-fPIC",
    ]
    done = subprocess.run([*command, "-c", source, "-o", "a.o"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
