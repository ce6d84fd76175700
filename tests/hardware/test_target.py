"""The GPU that a plan is for, and how much of its memory and the host's memory the plan may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.hardware import target
from mbc.hardware.spec import find_spec
from mbc.hardware.target import LocalGpu, current_gpu, free_bytes, free_host_bytes, machine_memory_bytes
from mbc.options import UNLIMITED_BYTES


def files(folder: Path, *texts: str) -> list[str]:
    paths = [folder / str(i) for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="ascii")
    return [*map(str, paths), str(folder / "missing")]


def test_the_machine_or_the_limit_of_its_control_group(tmp_path: Path) -> None:
    machine = "MemTotal:       2048 kB\nMemFree:        1024 kB\n"
    assert machine_memory_bytes(files(tmp_path, machine)) == 2048 << 10
    assert machine_memory_bytes(files(tmp_path, machine, "max\n")) == 2048 << 10
    assert machine_memory_bytes(files(tmp_path, machine, "1000000\n")) == 1000000
    assert machine_memory_bytes(files(tmp_path, "nothing of the kind")) is None
    assert machine_memory_bytes([]) is None


def test_half_of_this_machine_bounds_plans_for_it_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("l4")
    here = LocalGpu(spec.name, "580.1", spec.architecture, spec.memory_bytes, spec.memory_bytes)
    monkeypatch.setattr(target, "machine_memory_bytes", lambda: 1000)
    monkeypatch.setattr(target, "local_gpus", lambda: (here,))
    assert free_host_bytes(spec, "auto") == 500
    assert free_host_bytes(spec, "l4") == UNLIMITED_BYTES
    assert free_host_bytes(find_spec("h200"), "auto") == UNLIMITED_BYTES
    monkeypatch.setattr(target, "local_gpus", lambda: ())
    assert free_host_bytes(spec, "auto") == UNLIMITED_BYTES


@pytest.mark.parametrize(
    ("visible", "number"),
    [(None, 0), ("0", 0), ("1,0", 1), ("", None), ("-1", None), ("2", None), ("GPU-bb", 1), ("GPU-c", None)],
)
def test_the_gpu_that_is_left_to_be_seen(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, number: int | None
) -> None:
    spec = find_spec("l4")
    here = [
        LocalGpu(spec.name, "580.1", spec.architecture, spec.memory_bytes, free, uuid)
        for free, uuid in ((1 << 30, "GPU-aa1"), (2 << 30, "GPU-bb2"))
    ]
    monkeypatch.setattr(target, "local_gpus", lambda: tuple(here))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = None if number is None else here[number]
    assert current_gpu() == expected
    assert free_bytes(spec, "auto") == (expected.free_bytes if expected else spec.memory_bytes)
    assert free_bytes(spec, "l4") == spec.memory_bytes


def test_a_plan_takes_no_more_than_cuda_can_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi reports the reserved bytes of an idle H200 as free, but CUDA cannot allocate them."""
    spec = find_spec("h200")
    here = LocalGpu(spec.name, "580.1", spec.architecture, 143_771 << 20, 143_161 << 20)
    monkeypatch.setattr(target, "local_gpus", lambda: (here,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert here.free_bytes > spec.memory_bytes == free_bytes(spec, "auto")
