"""Links between GPUs, with a driver library that is simulated by a table."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mbc.hardware import topology
from mbc.hardware.collective_times import Link
from mbc.hardware.topology import link_between

READ, NVLINK = 0, 2


class Nvml:
    """A fake of the driver library for GPUs `a`, `b`, ...; `links`: the properties of each pair of GPUs."""

    def __init__(self, links: dict[tuple[str, str], set[int]]) -> None:
        self.links, self.open = links, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        device._obj.value = ord(uuid)
        return 0 if uuid != b"?" else 6

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, capability: Any, status: Any) -> int:
        able = self.links[chr(a.value), chr(b.value)]
        status._obj.value = 0 if capability.value in able else 5
        return 0


@pytest.mark.parametrize(
    ("links", "gpus", "expected"),
    [
        ({("a", "b"): {READ, NVLINK}}, "ab", Link.NVLINK),
        ({("a", "b"): {READ}}, "ab", Link.PCIE),
        ({("a", "b"): set()}, "ab", Link.SHARED_MEMORY),
        ({("a", "b"): {READ, NVLINK}, ("a", "c"): {READ}, ("b", "c"): {READ, NVLINK}}, "abc", Link.PCIE),
        ({}, "a?", Link.PCIE),
    ],
)
def test_the_slowest_link_counts(monkeypatch: pytest.MonkeyPatch, links: Any, gpus: str, expected: Link):
    nvml = Nvml(links)
    monkeypatch.setattr(topology.ctypes, "CDLL", lambda name: nvml)
    assert link_between(gpus, {}) is expected and nvml.open == 0


def test_features_switched_off_in_nccl():
    assert link_between("ab", {"NCCL_P2P_DISABLE": "1"}) is Link.SHARED_MEMORY
    assert link_between("ab", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}) is Link.SOCKET


def test_without_the_driver_s_library(monkeypatch: pytest.MonkeyPatch):
    def none(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(topology.ctypes, "CDLL", none)
    assert link_between("ab", {}) is Link.PCIE
