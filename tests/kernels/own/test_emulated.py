"""Every kernel, in every layout and element type, compiled by g++ and run on the CPU thread by thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mbc.ir.types import Precision
from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.own import few_channels
from mbc.resources import folder
from tests.kernels.own.cases import CASES, Case
from tests.kernels.own.groups import groups_in
from tests.kernels.own.launching import HostMemory, Library, check

EMULATOR = Path(__file__).parent / "emulator"
PRECISIONS = (Precision.FP32, Precision.BF16)  # one library holds both; fp16 takes the same way through each kernel
GXX = shutil.which("g++")
FILTER_PASS = few_channels.KERNELS[-1]
pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(tmp_path_factory.mktemp("kernels"), DTYPE_CODES["bf16"])


def build(where: Path, working: int, names: Sequence[str] = ()) -> Library:
    """The sources of these names, or all, in one library."""
    assert GXX is not None
    templates = folder("templates")
    source = where / "kernels.cpp"
    names = names or sorted(file.name for file in (templates / "kernels").glob("*.cu"))
    source.write_text("".join(f'#include "{name}"\n' for name in names))
    include = [EMULATOR, templates / "include", templates / "kernels", templates / "host"]
    command = [GXX, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    command += [f"-DMBC_WORKING={working}", *(f"-I{path}" for path in include)]
    result = where / "kernels.so"
    done = subprocess.run([*command, str(source), "-o", str(result)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Library(ctypes.CDLL(str(result)), HostMemory())


@pytest.mark.parametrize(
    ("case", "precision"),
    [(c, p) for c in (*CASES, *groups_in(Precision.BF16)) for p in PRECISIONS if p in c.precisions],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_kernel(case: Case, precision: Precision, library: Library):
    check(library, case, precision)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.kind == FILTER_PASS.kind and FILTER_PASS.takes(c.request(Precision.BF16))],
    ids=lambda case: case.name,
)
def test_a_block_goes_on_with_the_next_tile(case: Case, parts: int, library: Library, monkeypatch: pytest.MonkeyPatch):
    """What is fetched ahead may belong to another image."""
    monkeypatch.setattr(few_channels, "MOST_PARTS", parts)
    check(library, case, Precision.BF16)
