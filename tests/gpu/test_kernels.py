"""mbc's own kernels on a real GPU, each in every layout and element type, against the operations in float64.

The worst error of each kind is printed at the end, as a share of what is allowed (tests/kernels/cuda/launching.py says
how much that is for each element type). A newer GPU also poses as each older architecture, with its PTX, and runs the
kernels that this architecture has. With MBC_MEMCHECK=1 no operand has bytes before or after it that would hide an
access outside of it:

    MBC_MEMCHECK=1 compute-sanitizer --target-processes all --error-exitcode 9 pytest tests/gpu/test_kernels.py
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from mbc.codegen.build import build_kernel_library
from mbc.codegen.toolchain import find_toolchain
from mbc.hardware.datasheet import capability_of
from mbc.hardware.target import find_device
from mbc.ir.types import Precision
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cuda.generated.lowering import lower
from tests.kernels.cuda.cases import CASES, GENERATED, PRECISIONS, STATISTICS, Case
from tests.kernels.cuda.groups import GENERATED_GROUPS, groups_in
from tests.kernels.cuda.launching import (
    GUARD_BYTES,
    REPEATED,
    TOLERANCES,
    Library,
    check,
    check_statistics,
    offered_anywhere,
    repeats,
)


class Libraries(Protocol):
    """Returns the library of a precision, for the GPU itself or for an architecture as which it poses."""

    def __call__(self, precision: Precision, pose: str = "") -> Library: ...


POSES = {"sm_75": Precision.FP16, "sm_80": Precision.BF16, "sm_86": Precision.BF16, "sm_89": Precision.BF16}
MEMCHECK = os.environ.get("MBC_MEMCHECK") == "1"


@dataclass
class DeviceMemory:
    """GPU memory through PyCUDA, an allocation for each operand. Each copy waits for the default stream's kernels."""

    driver: Any
    held: list[Any] = field(default_factory=list[Any])

    def allocate(self, size_bytes: int) -> int:
        self.held.append(self.driver.mem_alloc(max(1, size_bytes)))
        return int(self.held[-1])

    def write(self, address: int, data: bytes) -> None:
        if data:
            self.driver.memcpy_htod(address, data)

    def read(self, address: int, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        if data:
            self.driver.memcpy_dtoh(data, address)
        return bytes(data)

    def free_all(self) -> None:
        while self.held:
            self.held.pop().free()


def posing(pose: str) -> tuple[list[str], Callable[[Request], list[Candidate]]]:
    """Return the kernels that a GPU which poses has, and the function that offers them for a request."""
    device = find_device(f"auto@{pose}")
    with_source = [kernel for kernel in KERNELS.values() if kernel.file]  # the others are generated
    names = [kernel.name for kernel in with_source if kernel.needs is None or device.has(kernel.needs)]
    return names, lambda request: list(OWN.candidates(request, device))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Libraries]:
    driver = pytest.importorskip("pycuda.driver", reason="PyCUDA is not installed, or finds no CUDA driver")
    toolchain = find_toolchain()
    if toolchain.missing:
        pytest.skip("needs " + "; ".join(map(str, toolchain.missing)))
    try:
        driver.init()
        device = driver.Device(0)
    except driver.Error as error:
        pytest.skip(f"no GPU: {error}")
    context = device.retain_primary_context()
    context.push()
    own = "sm_{}{}".format(*device.compute_capability())
    built: dict[tuple[Precision, str], Library] = {}

    def library(precision: Precision, pose: str = "") -> Library:
        if pose and capability_of(pose) >= capability_of(own):
            pytest.skip("the GPU is not newer")
        if (precision, pose) not in built:
            path = tmp_path_factory.mktemp("kernels") / "libkernels.so"
            lowered = {lower(case.request(precision)) for case in (*GENERATED, *GENERATED_GROUPS)}
            programs = {one.program.name: one.program for one in lowered if one is not None}
            kernels, offered = posing(pose) if pose else (None, offered_anywhere)
            build_kernel_library(pose or own, precision, path, toolchain, kernels, tuple(programs.values()))
            memory, guard_bytes = DeviceMemory(driver), 0 if MEMCHECK else GUARD_BYTES
            handle = ctypes.CDLL(str(path))
            built[precision, pose] = Library(handle, memory, guard_bytes=guard_bytes, offered=offered)
        return built[precision, pose]

    try:
        yield library
    finally:
        context.pop()


@pytest.fixture(scope="module")
def worst(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, Precision], float]]:
    shares: dict[tuple[str, Precision], float] = defaultdict(float)
    yield shares
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    if not isinstance(terminal, pytest.TerminalReporter) or not shares:
        return
    allowed = ", ".join(f"{dtype} {tolerance:.1e}" for dtype, tolerance in TOLERANCES.items())
    terminal.write_line(f"\nworst relative L2 error as a share of what is allowed ({allowed})")
    for kind in sorted({kind for kind, _ in shares}):
        cells = "  ".join(f"{precision} {shares[kind, precision]:.3f}" for precision in PRECISIONS)
        terminal.write_line(f"  {kind:32} {cells}")


def cases_in(precision: Precision) -> list[Case]:
    """Return all cases of a precision."""
    return [c for c in (*CASES, *GENERATED, *GENERATED_GROUPS, *groups_in(precision)) if precision in c.precisions]


def checked(library: Library, case: Case, precision: Precision) -> float:
    """Check the kernels of a case and return the worst error; skip it if the architecture has no kernel for it."""
    if not library.offered(case.request(precision)):
        pytest.skip("the architecture has no kernel for it")
    return check(library, case, precision)


@pytest.mark.parametrize(
    ("case", "precision"),
    [(c, p) for p in PRECISIONS for c in cases_in(p)],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_kernel(case: Case, precision: Precision, libraries: Libraries, worst: dict[tuple[str, Precision], float]):
    share = checked(libraries(precision), case, precision)
    worst[case.kind, precision] = max(worst[case.kind, precision], share)


@pytest.mark.parametrize(
    ("case", "pose"),
    [(case, pose) for pose, precision in POSES.items() for case in cases_in(precision)],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_kernel_of_a_gpu_that_poses(case: Case, pose: str, libraries: Libraries):
    checked(libraries(POSES[pose], pose), case, POSES[pose])


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("case", STATISTICS, ids=lambda case: case.name)
def test_statistics_of_a_convolutions_result(case: Case, precision: Precision, libraries: Libraries):
    check_statistics(libraries(precision), case, precision)


@pytest.mark.parametrize("kind", REPEATED)
def test_repeated_samples_of_more_than_2_to_the_31_elements(kind: str, libraries: Libraries):
    assert repeats(libraries(Precision.BF16), kind, 128, 64, (448, 448))
