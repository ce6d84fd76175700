"""Host bridges and NUMA nodes of GPUs, read from a tree like Linux's, and threads that run next to a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mbc.hardware.numa import GpuPlace, cpus_near, gpu_place, near


def tree(folder: Path, node: str = "1", cpus: str = "2-3,6\n") -> Path:
    """Two GPUs behind a switch of one bridge, as sysfs shows them."""
    for address in ("0000:1b:00.0", "0000:1c:00.0"):
        device = folder / "devices" / "pci0000:15" / "0000:15:01.0" / "0000:16:00.0" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (folder / "bus" / "pci" / "devices").mkdir(parents=True, exist_ok=True)
        (folder / "bus" / "pci" / "devices" / address).symlink_to(device)
    (folder / "devices" / "system" / "node" / "node1").mkdir(parents=True)
    (folder / "devices" / "system" / "node" / "node1" / "cpulist").write_text(cpus)
    return folder


@pytest.mark.parametrize("bus_id", ["0000:1b:00.0", "0000:1B:00.0", "00000000:1B:00.0"])
def test_bridge_and_node_by_any_form_of_the_address(tmp_path: Path, bus_id: str) -> None:
    place = gpu_place(bus_id, tree(tmp_path))
    assert place == GpuPlace("pci0000:15", 1)
    assert str(place) == "host bridge pci0000:15, NUMA node 1"
    assert cpus_near(bus_id, tmp_path) == {2, 3, 6}


def test_one_node_or_none_reported(tmp_path: Path) -> None:
    place = gpu_place("0000:1c:00.0", tree(tmp_path, node="-1"))
    assert place == GpuPlace("pci0000:15") and str(place) == "host bridge pci0000:15"
    assert not cpus_near("0000:1c:00.0", tmp_path)


@pytest.mark.parametrize("bus_id", ["", "0000:1d:00.0", "../../../etc", "GPU-1234"])
def test_no_such_gpu(tmp_path: Path, bus_id: str) -> None:
    place = gpu_place(bus_id, tree(tmp_path))
    assert place == GpuPlace() and not str(place)


@pytest.mark.parametrize("cpus", ["", "x-y", "1-"])
def test_an_unknown_number_of_processors(tmp_path: Path, cpus: str) -> None:
    assert not cpus_near("0000:1b:00.0", tree(tmp_path, cpus=cpus))


def test_a_thread_runs_next_to_the_gpu_and_then_where_it_ran(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    own = max(before)
    with near("0000:1b:00.0", tree(tmp_path, cpus=f"{own},{own + 1000}")):
        assert os.sched_getaffinity(0) == {own}
    assert os.sched_getaffinity(0) == before


def test_processors_that_this_process_may_not_use_change_nothing(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    with near("0000:1b:00.0", tree(tmp_path, cpus=f"{max(before) + 1000}")):
        assert os.sched_getaffinity(0) == before
