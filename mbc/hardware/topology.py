"""Links between the GPUs of this machine, according to the driver's library and NCCL's environment variables."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from itertools import combinations

from mbc.hardware.collective_times import Link

_SUCCESS = 0  # NVML_SUCCESS, NVML_P2P_STATUS_OK
_READ, _NVLINK = 0, 2  # nvmlGpuP2PCapsIndex_t
_SLOWEST_LAST = (Link.NVLINK, Link.PCIE, Link.SHARED_MEMORY, Link.SOCKET)


def link_between(uuids: Sequence[str], environment: Mapping[str, str] = os.environ) -> Link:
    """Return the slowest link between any two of the GPUs with these UUIDs; PCIe if the driver's library gives none."""
    if environment.get("NCCL_P2P_DISABLE") == "1":
        return Link.SOCKET if environment.get("NCCL_SHM_DISABLE") == "1" else Link.SHARED_MEMORY
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Link.PCIE
    if nvml.nvmlInit_v2() != _SUCCESS:
        return Link.PCIE
    try:
        links = [_link(nvml, pair) for pair in combinations(uuids, 2)]
    finally:
        nvml.nvmlShutdown()
    return max(links, key=_SLOWEST_LAST.index, default=Link.PCIE)


def _link(nvml: ctypes.CDLL, uuids: Sequence[str]) -> Link:
    devices = [ctypes.c_void_p() for _ in uuids]
    for uuid, device in zip(uuids, devices, strict=True):
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != _SUCCESS:
            return Link.PCIE

    def can(capability: int) -> bool:
        status = ctypes.c_int(-1)
        answer = nvml.nvmlDeviceGetP2PStatus(*devices, ctypes.c_int(capability), ctypes.byref(status))
        return answer == _SUCCESS and status.value == _SUCCESS

    if can(_NVLINK):
        return Link.NVLINK
    return Link.PCIE if can(_READ) else Link.SHARED_MEMORY
