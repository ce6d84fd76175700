"""mbc's own kernels on a real GPU, each in every layout and element type, against the operations in float64.

The worst error of each kind is printed at the end, as a share of what is allowed (tests/kernels/cuda/launching.py says
how much that is for each element type).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from mbc.codegen.build import build_kernel_library
from mbc.codegen.toolchain import find_toolchain
from mbc.ir.types import Precision
from mbc.kernels.cuda.generated.lowering import lower
from tests.kernels.cuda.cases import CASES, GENERATED, PRECISIONS, STATISTICS, Case
from tests.kernels.cuda.groups import GENERATED_GROUPS, groups_in
from tests.kernels.cuda.launching import REPEATED, TOLERANCES, Library, check, check_statistics, repeats

Libraries = Callable[[Precision], Library]


ARENA_BYTES = 256 << 20
LARGE_BYTES = 12 << 30  # for a volume of 64 x 256 x 448 x 448 elements and what is computed from it


@dataclass
class DeviceMemory:
    """One allocation of GPU memory through PyCUDA, handed out piece by piece.

    Each copy waits for the kernels of the default stream.
    """

    driver: Any
    arena: Any
    arena_bytes: int = ARENA_BYTES
    used_bytes: int = 0

    def allocate(self, size_bytes: int) -> int:
        address = int(self.arena) + self.used_bytes
        self.used_bytes += -(-size_bytes // 256) * 256
        assert self.used_bytes <= self.arena_bytes
        return address

    def write(self, address: int, data: bytes) -> None:
        self.driver.memcpy_htod(address, data)

    def read(self, address: int, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self.driver.memcpy_dtoh(data, address)
        return bytes(data)

    def free_all(self) -> None:
        self.used_bytes = 0


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
    arena = driver.mem_alloc(ARENA_BYTES)
    architecture = "sm_{}{}".format(*device.compute_capability())
    built: dict[Precision, Library] = {}

    def library(precision: Precision) -> Library:
        if precision not in built:
            path = tmp_path_factory.mktemp("kernels") / "libkernels.so"
            lowered = {lower(case.request(precision)) for case in (*GENERATED, *GENERATED_GROUPS)}
            programs = {one.program.name: one.program for one in lowered if one is not None}
            build_kernel_library(architecture, precision, path, toolchain, programs=tuple(programs.values()))
            built[precision] = Library(ctypes.CDLL(str(path)), DeviceMemory(driver, arena))
        return built[precision]

    try:
        yield library
    finally:
        arena.free()
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


@pytest.mark.parametrize(
    ("case", "precision"),
    [(c, p) for p in PRECISIONS for c in (*CASES, *GENERATED, *GENERATED_GROUPS, *groups_in(p)) if p in c.precisions],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_kernel(case: Case, precision: Precision, libraries: Libraries, worst: dict[tuple[str, Precision], float]):
    share = check(libraries(precision), case, precision)
    worst[case.kind, precision] = max(worst[case.kind, precision], share)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("case", STATISTICS, ids=lambda case: case.name)
def test_statistics_of_a_convolutions_result(case: Case, precision: Precision, libraries: Libraries):
    check_statistics(libraries(precision), case, precision)


@pytest.mark.parametrize("kind", REPEATED)
def test_samples_of_more_than_2_to_the_31_elements(kind: str, libraries: Libraries):
    library = libraries(Precision.BF16)
    assert isinstance(library.memory, DeviceMemory)
    driver = library.memory.driver
    memory = DeviceMemory(driver, driver.mem_alloc(LARGE_BYTES), LARGE_BYTES)
    try:
        assert repeats(Library(library.handle, memory), kind, 128, 64, (448, 448))
    finally:
        memory.arena.free()
