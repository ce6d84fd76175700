"""Specifications of GPUs: the datasheet and, where measured, attainable peaks."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveModel, Link
from mbc.hardware.part import check_part, part_name, split_name
from mbc.hardware.transfers import AnyLink, HostLink, Links, PeerLink, estimated_link, estimated_peer_link
from mbc.resources import data_text

# By judgement: a multiprocessor moves more bytes than its share where few others ask for memory.
_COPY_SHARE_OF_PART = 1.5
# By compute capability in tenths.
_SHARED_KIB = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One GPU. Rates are ceilings: of the datasheet and dense, or measured where `measured`. `fp32_tflops` and the like
    are of matrix products in that precision (fp32: without tensor cores). `launch_us` is the time from one node of a
    CUDA graph to the next; where it was not measured it is by judgement, longer on older GPUs.

    `overhead_bytes` is the device memory outside the arena after a first step, the bare context included; 0 when it
    was never measured. `collectives`: over the link by which such GPUs are usually joined. `communicator_bytes`: device
    memory that NCCL takes, where several GPUs share a mini-batch. `host_link` and `peer_link` are estimates even of a
    GPU that was measured: they are the machine's around the GPU.
    """

    name: str
    architecture: str  # sm_90
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    copy_gb_s: float
    fp32_tflops: float
    tf32_tflops: float
    bf16_tflops: float
    fp16_tflops: float
    launch_us: float
    overhead_bytes: int
    host_link: HostLink
    peer_link: PeerLink
    measured: bool
    buildable: bool  # the CUDA toolkit still makes code for it
    collectives: CollectiveModel
    communicator_bytes: int = 0

    @property
    def links(self) -> Links:
        """What carries copies out of its memory and back."""
        return Links(self.host_link, self.peer_link)

    @property
    def has_bf16(self) -> bool:
        """Whether cuDNN and cuBLASLt compute in bf16 on it: from compute capability 8.0 on."""
        return self._compute_capability >= 80

    @property
    def has_clusters(self) -> bool:
        """Whether blocks of a cluster read each other's shared memory: from compute capability 9.0 on."""
        return self._compute_capability >= 90

    @property
    def has_warpgroups(self) -> bool:
        """Whether four warps start products together (wgmma): compute capability 9.0, before and after it not."""
        return has_warpgroups(self.architecture)

    @property
    def shared_bytes_of_block(self) -> int:
        """The most that it may have (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
        return _SHARED_KIB.get(self._compute_capability, 48) << 10

    @property
    def _compute_capability(self) -> int:
        """In tenths."""
        return int(self.architecture.removeprefix("sm_").rstrip("af"))


def has_warpgroups(architecture: str) -> bool:
    """Of GPUs of this architecture, `DeviceSpec.has_warpgroups`."""
    return architecture.rstrip("af") == "sm_90"


@cache
def device_specs() -> Mapping[str, DeviceSpec]:
    """Every GPU known, by its short name."""
    return MappingProxyType({key: _spec(row) for key, row in json.loads(data_text("gpus.json")).items()})


def _spec(row: dict[str, Any]) -> DeviceSpec:
    known = {f.name for f in fields(DeviceSpec)}
    link = _as_seen(estimated_link(row["pcie_generation"], row["pcie_lanes"]), row)
    nvlink_gb_s = row.get("nvlink_gb_s", 0.0)  # each direction between two of them; 0: joined by the bus
    peer = estimated_peer_link(link, nvlink_gb_s)
    joined = Link.NVLINK if nvlink_gb_s else Link.PCIE
    settings = {key: value for key, value in row.items() if key in known}
    return DeviceSpec(
        host_link=link, peer_link=_as_seen(peer, row), collectives=CollectiveModel(joined), **settings
    )  # fmt: skip


def _as_seen(link: AnyLink, row: dict[str, Any]) -> AnyLink:
    """What was seen on some machine with this GPU is a better guess than what its bus promises."""
    return replace(link, **{f.name: row[f.name] for f in fields(link) if f.name.endswith("_gb_s") and f.name in row})


def is_plan_only(architecture: str) -> bool:
    """Whether GPUs of this architecture are known and too old for the CUDA toolkit."""
    return any(spec.architecture == architecture and not spec.buildable for spec in device_specs().values())


def find_spec(name: str) -> DeviceSpec:
    """The GPU called `name`; MBC070 with the known names when there is none."""
    specs = device_specs()
    key = name.lower().replace("nvidia", "").strip().replace(" ", "-")
    if key in specs:
        return specs[key]
    near = difflib.get_close_matches(key, list(specs), 1)
    meant = f"did you mean {near[0]}? Else " if near else ""
    raise MbcError("MBC070", f"unknown GPU '{name}'", f"{meant}choose one of {', '.join(specs)}")


def known_spec(name: str) -> DeviceSpec | None:
    """Of the GPU that the driver calls `name`, or of a part of it; None of one that is not in the list."""
    whole, _ = split_name(name)
    found = next((spec for spec in device_specs().values() if spec.name == whole), None)
    return None if found is None else spec_like(name, found.architecture)


def spec_like(name: str, architecture: str) -> DeviceSpec:
    """What is known of the GPU that the driver calls `name`, or of a part of it (`part_of`); of one not in the list,
    what is known of the first of its architecture, else of the first of all, and then never measured."""
    whole, multiprocessors = split_name(name)
    if multiprocessors is not None:
        return part_of(spec_like(whole, architecture), multiprocessors)
    known = device_specs().values()
    for spec in known:
        if spec.name == name:
            return spec
    alike = next((s for s in known if s.architecture == architecture), next(iter(known)))
    return replace(alike, name=name, architecture=architecture, measured=False)


def part_of(spec: DeviceSpec, multiprocessors: int) -> DeviceSpec:
    """So many multiprocessors of the GPU (`mbc.hardware.part`), its rates by judgement. MBC286 where the driver makes
    no such part."""
    check_part(spec.name, spec.architecture, spec.multiprocessors, multiprocessors)
    share = multiprocessors / spec.multiprocessors
    return replace(
        spec,
        name=part_name(spec.name, multiprocessors),
        multiprocessors=multiprocessors,
        measured=False,
        copy_gb_s=spec.copy_gb_s * min(1.0, _COPY_SHARE_OF_PART * share),
        fp32_tflops=spec.fp32_tflops * share,
        tf32_tflops=spec.tf32_tflops * share,
        bf16_tflops=spec.bf16_tflops * share,
        fp16_tflops=spec.fp16_tflops * share,
    )
