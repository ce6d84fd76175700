"""Values that the driver's library reports; a small fake library is built here."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from mbc.runtime import nvml

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build a driver's library with")

# The structures as nvml.h declares them.
SOURCE = """
#include <cstring>
struct Memory { unsigned long long total, free, used; };
struct Process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
static int open_count = 0;
static unsigned long long of(unsigned i) { return (UNKNOWN && i == 1) ? ~0ull : 1000ull * (i + 1); }
extern "C" {
int opened() { return open_count; }
int nvmlInit_v2() { ++open_count; return 0; }
int nvmlShutdown() { --open_count; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  *device = reinterpret_cast<void*>(7);
  return std::strcmp(id, "0000:01:00.0") == 0 ? 0 : 6;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* info) {
  *info = Memory{100, 58, 42};
  return device == reinterpret_cast<void*>(7) ? 0 : 2;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* found) {
  const unsigned room = *count;
  *count = PROCESSES;
  if (room < PROCESSES) return 7;
  for (unsigned i = 0; i < PROCESSES; ++i) found[i] = Process{100 + i, of(i), ~0u, ~0u};
  return device == reinterpret_cast<void*>(7) ? 0 : 2;
}
}
"""


def library(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, unknown: bool = False) -> ctypes.CDLL:
    path = folder / f"libnvidia-ml-{count}-{unknown}.so"
    defined = [f"-DPROCESSES={count}", f"-DUNKNOWN={int(unknown)}"]
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path), *defined], input=SOURCE, text=True, check=True
    )
    built = ctypes.CDLL(str(path))
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: built)
    return built


@pytest.mark.parametrize("count", [0, 3, 200])
def test_memory_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    built = library(tmp_path, monkeypatch, count)
    assert nvml.used_bytes("0000:01:00.0") == 42
    assert nvml.processes("0000:01:00.0") == {100 + i: 1000 * (i + 1) for i in range(count)}
    assert nvml.used_bytes("0000:02:00.0") is None and nvml.processes("0000:02:00.0") is None
    assert built.opened() == 0


def test_a_process_of_unknown_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, 3, unknown=True)
    assert nvml.processes("0000:01:00.0") is None


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nvml.ctypes, "CDLL", missing)
    assert nvml.used_bytes("0000:01:00.0") is None and nvml.processes("0000:01:00.0") is None
