"""Specifications of GPUs: the datasheet and, where measured, attainable peaks."""

from __future__ import annotations

import difflib
import json
import re
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

# Judgement: a multiprocessor can use more than its share of the bandwidth if few others use memory.
_COPY_SHARE_OF_PART = 1.5
# Shared memory of a block by compute capability in tenths.
_SHARED_KIB = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Specification of one GPU.

    Rates are upper limits: dense ones of the datasheet, or measured ones if `measured`. `fp32_tflops` and similar
    fields are the rates of matrix products in that precision (fp32: without tensor cores). `launch_us` is the time from
    one node of a CUDA graph to the next; without a measurement it is an assumption, longer for older GPUs.

    `overhead_bytes` is the device memory outside the arena after a first step, with the context; 0 if it was never
    measured. `collectives` apply to the link that usually connects such GPUs. `communicator_bytes` is the device memory
    that NCCL uses if several GPUs share a mini-batch. `host_link` and `peer_link` are estimates even for a measured
    GPU, because they depend on the machine.
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
    buildable: bool  # the CUDA toolkit still supports its architecture
    collectives: CollectiveModel
    communicator_bytes: int = 0

    @property
    def links(self) -> Links:
        """The links that carry copies between its memory and others."""
        return Links(self.host_link, self.peer_link)

    @property
    def has_bf16(self) -> bool:
        """True if cuDNN and cuBLASLt compute in bf16 on it: from compute capability 8.0 on."""
        return self._compute_capability >= 80

    @property
    def has_clusters(self) -> bool:
        """True if the blocks of a cluster can read each other's shared memory: from compute capability 9.0 on."""
        return self._compute_capability >= 90

    @property
    def has_warpgroups(self) -> bool:
        """True if four warps together start matrix products (wgmma): compute capability 9.0 only."""
        return has_warpgroups(self.architecture)

    @property
    def shared_bytes_of_block(self) -> int:
        """Largest shared memory of a block (CUDA C++ Programming Guide, "Technical Specifications")."""
        return _SHARED_KIB.get(self._compute_capability, 48) << 10

    @property
    def _compute_capability(self) -> int:
        """The compute capability in tenths."""
        return int(self.architecture.removeprefix("sm_").rstrip("af"))


def has_warpgroups(architecture: str) -> bool:
    """Return `DeviceSpec.has_warpgroups` for GPUs of this architecture."""
    return architecture.rstrip("af") == "sm_90"


@cache
def device_specs() -> Mapping[str, DeviceSpec]:
    """Return every listed GPU by its short name."""
    return MappingProxyType({key: _spec(row) for key, row in json.loads(data_text("gpus.json")).items()})


def _spec(row: dict[str, Any]) -> DeviceSpec:
    names = {f.name for f in fields(DeviceSpec)}
    link = _with_observed_rates(estimated_link(row["pcie_generation"], row["pcie_lanes"]), row)
    nvlink_gb_s = row.get("nvlink_gb_s", 0.0)  # each direction between two GPUs; 0: connected by the bus
    peer = estimated_peer_link(link, nvlink_gb_s)
    joined = Link.NVLINK if nvlink_gb_s else Link.PCIE
    settings = {key: value for key, value in row.items() if key in names}
    return DeviceSpec(
        host_link=link, peer_link=_with_observed_rates(peer, row), collectives=CollectiveModel(joined), **settings
    )  # fmt: skip


def _with_observed_rates(link: AnyLink, row: dict[str, Any]) -> AnyLink:
    """Return the link with the rates that `row` has: rates measured on a machine with this GPU.

    Such a rate is a better guess than the nominal rate of the bus.
    """
    return replace(link, **{f.name: row[f.name] for f in fields(link) if f.name.endswith("_gb_s") and f.name in row})


def is_plan_only(architecture: str) -> bool:
    """Return whether the GPUs of this architecture are listed but too old for the CUDA toolkit."""
    return any(spec.architecture == architecture and not spec.buildable for spec in device_specs().values())


def find_spec(name: str) -> DeviceSpec:
    """Return the GPU called `name`.

    Raises:
        MbcError: MBC070, no GPU of that name is listed; the message lists the names.
    """
    specs = device_specs()
    key = name.lower().replace("nvidia", "").strip().replace(" ", "-")
    if key in specs:
        return specs[key]
    words = [word for word in re.split(r"[-\s]+", key) if word]
    near = [listed for listed in specs if all(word in listed for word in words)]
    if (
        not near and len(words) > 1
    ):  # another card of the same series has a name too different for a spelling correction
        near = [listed for listed in specs if any(word in listed.split("-") for word in words)]
    near = near or difflib.get_close_matches(key, list(specs), 1)
    meant = f"did you mean {' or '.join(near)}? Else " if near and words else ""
    raise MbcError("MBC070", f"unknown GPU '{name}'", f"{meant}choose one of {', '.join(specs)}")


def known_spec(name: str) -> DeviceSpec | None:
    """Return the spec of the GPU with this driver name, or of a part of it; None if it is not listed."""
    whole, _ = split_name(name)
    match = next((spec for spec in device_specs().values() if spec.name == whole), None)
    return None if match is None else spec_like(name, match.architecture)


def spec_like(name: str, architecture: str) -> DeviceSpec:
    """Return the spec of the GPU with this driver name, or of a part of it (`part_of`).

    A GPU that is not listed gets the spec of the first listed GPU of its architecture. If none has its architecture,
    it gets the spec of the first listed GPU. Either spec is marked as not measured.
    """
    whole, multiprocessors = split_name(name)
    if multiprocessors is not None:
        return part_of(spec_like(whole, architecture), multiprocessors)
    specs = device_specs().values()
    for spec in specs:
        if spec.name == name:
            return spec
    alike = next((s for s in specs if s.architecture == architecture), next(iter(specs)))
    return replace(alike, name=name, architecture=architecture, measured=False)


def part_of(spec: DeviceSpec, multiprocessors: int) -> DeviceSpec:
    """Return the spec of a part of the GPU (`mbc.hardware.part`); its rates are judgements.

    Raises:
        MbcError: MBC286, the driver cannot create such a part.
    """
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
