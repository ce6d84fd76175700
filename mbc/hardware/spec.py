"""Specifications of GPUs: the datasheet and, where measured, attainable peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.card_file import sheet_of
from mbc.hardware.card_names import choose_card
from mbc.hardware.collective_times import CollectiveModel, Link
from mbc.hardware.datasheet import BUILDABLE, CARDS, Datasheet, capability_of, multiprocessor_of
from mbc.hardware.instructions import Instruction, has_instruction
from mbc.hardware.part import GpuName, check_part, split_name
from mbc.hardware.transfers import AnyLink, HostLink, Links, PeerLink, estimated_link, estimated_peer_link

# A multiprocessor can use more than its share of the bandwidth if few others use memory. Fitted to steps of twelve
# networks on 64 of an H200's 132 multiprocessors: copies reach 1.9 times their share, most products 1.0 (decision 102).
_COPY_SHARE_OF_PART = 1.2
# Share of the peak of tensor cores that mma.sync reaches on GPUs with newer instructions. 0.63 is the mean on an H100
# (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024); for tcgen05 it is a judgement.
_MMA_SYNC_SHARE = 0.63
_PCIE = ("pcie_generation", "pcie_lanes")
# Measured fields of a card, by the beginning of their names, and the figures for which they hold.
_HOLDS_FOR = MappingProxyType(
    {
        "memory_bytes": ("memory_bytes",), "to_host_": _PCIE, "to_device_": _PCIE, "to_peer_": ("nvlink_gb_s",),
        "from_peer_": ("nvlink_gb_s",),
    }
)  # fmt: skip


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
    architecture: str  # sm_90; that of the pose if the GPU poses as another one
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
    mma_sync_tflops: float = 0.0  # in bf16 and fp16 by mma.sync, where other instructions are faster; 0: all are equal
    sheet: Datasheet | None = None  # of the whole GPU, from which the limits follow

    @property
    def links(self) -> Links:
        """The links that carry copies between its memory and others."""
        return Links(self.host_link, self.peer_link)

    @property
    def has_bf16_and_tf32(self) -> bool:
        """True if tensor cores, cuDNN and cuBLASLt compute in bf16 and tf32 on it: from compute capability 8.0 on."""
        return capability_of(self.architecture) >= 80

    def has(self, instruction: Instruction) -> bool:
        """Return whether the GPU has the instructions of this family."""
        return has_instruction(self.architecture, instruction)

    @property
    def own_architecture(self) -> str:
        """Architecture of the GPU itself, which differs from `architecture` if the GPU poses."""
        return self.architecture if self.sheet is None or not self.poses else self.sheet.architecture

    @property
    def code_architecture(self) -> str:
        """Architecture for which sources are compiled: of a GPU that poses the older one, whose PTX it can run."""
        return min(self.architecture, self.own_architecture, key=capability_of)

    @property
    def poses(self) -> bool:
        """True if the GPU runs code for another architecture, within that architecture's limits."""
        return bool(split_name(self.name).pose)

    @property
    def shared_bytes_of_block(self) -> int:
        """Largest shared memory of a block."""
        own_bytes = 0 if self.sheet is None else self.sheet.shared_bytes
        own_bytes = own_bytes or multiprocessor_of(self.own_architecture).shared_kib << 10
        return min(own_bytes, multiprocessor_of(self.architecture).shared_kib << 10) if self.poses else own_bytes


@cache
def device_specs() -> Mapping[str, DeviceSpec]:
    """Return every listed GPU by its short name."""
    return MappingProxyType({key: spec_of(sheet_of(row), row.get("planning")) for key, row in CARDS.items()})


def spec_of(sheet: Datasheet, planning: Mapping[str, Any] | None = None) -> DeviceSpec:
    """Return the spec of a card.

    Args:
        sheet: Its datasheet.
        planning: Fields of the spec and rates of its links that were measured, or judged from measurements, and are
            better than what follows from the datasheet.
    """
    better = planning or {}
    link = _with_observed_rates(estimated_link(sheet.pcie_generation, sheet.pcie_lanes), better)
    peer = _with_observed_rates(estimated_peer_link(link, sheet.nvlink_gb_s), better)
    names = {f.name for f in fields(DeviceSpec)}
    spec = DeviceSpec(
        sheet.name, sheet.architecture, sheet.multiprocessors, sheet.memory_bytes, sheet.l2_bytes, sheet.copy_gb_s,
        sheet.fp32_tflops, sheet.tf32_tflops, sheet.bf16_tflops, sheet.fp16_tflops,
        multiprocessor_of(sheet.architecture).launch_us, 0, link, peer, measured=False, buildable=True,
        collectives=CollectiveModel(Link.NVLINK if sheet.nvlink_gb_s else Link.PCIE), sheet=sheet,
        mma_sync_tflops=_MMA_SYNC_SHARE * sheet.fp16_tflops * any(
            has_instruction(sheet.architecture, one) for one in (Instruction.WGMMA, Instruction.TCGEN05)
        ),
    )  # fmt: skip
    return replace(spec, **{key: value for key, value in better.items() if key in names})


@cache
def spec_of_sheet(sheet: Datasheet) -> DeviceSpec:
    """Return the spec of the card with this datasheet, which a user's file or a plan has.

    If it is a listed card (`is_one_card`), the spec has everything that was measured on such cards, except for a part
    that differs: the memory, the rates of the PCIe link, or those of NVLink.
    """
    for row in CARDS.values():
        listed = sheet_of(row)
        if is_one_card(listed, sheet):
            differs = {f.name for f in fields(Datasheet) if getattr(listed, f.name) != getattr(sheet, f.name)}
            outdated = tuple(field for field, figures in _HOLDS_FOR.items() if differs & {*figures})
            planning: Mapping[str, Any] = row.get("planning", {})
            return spec_of(sheet, {field: value for field, value in planning.items() if not field.startswith(outdated)})
    return spec_of(sheet)


def is_one_card(one: Datasheet, other: Datasheet) -> bool:
    """Return whether kernels take the same time on both cards, so that what was measured on one holds for the other.

    Cards of one name may differ in memory, PCIe link and NVLink, which decide no kernel's time. A shared memory of a
    block that is given as that of the architecture is no difference.
    """
    return _without_links(one) == _without_links(other)


def _without_links(sheet: Datasheet) -> Datasheet:
    shared_bytes = sheet.shared_bytes or multiprocessor_of(sheet.architecture).shared_kib << 10
    return replace(sheet, memory_bytes=0, pcie_generation=0, pcie_lanes=0, nvlink_gb_s=0.0, shared_bytes=shared_bytes)


def _with_observed_rates(link: AnyLink, row: Mapping[str, Any]) -> AnyLink:
    """Return the link with the rates that `row` has: rates measured on a machine with this GPU.

    Such a rate is a better guess than the nominal rate of the bus.
    """
    return replace(link, **{f.name: row[f.name] for f in fields(link) if f.name.endswith("_gb_s") and f.name in row})


def is_plan_only(architecture: str) -> bool:
    """Return whether the GPUs of this architecture are listed but too old for the CUDA toolkit."""
    return any(spec.architecture == architecture and not spec.buildable for spec in device_specs().values())


@cache
def find_spec(name: str) -> DeviceSpec:
    """Return the GPU called `name`, as people or nvidia-smi write it.

    Raises:
        MbcError: MBC070, no GPU of that name is listed, or several are; the message lists the nearest names.
    """
    specs = device_specs()
    return specs[choose_card(name, {key: (spec.name, CARDS[key]["memory_gb"]) for key, spec in specs.items()})]


def known_spec(name: str, sheet: Datasheet | None = None) -> DeviceSpec | None:
    """Return the spec of the GPU with this driver name, or of a part of it; None if it is not listed.

    A `sheet` replaces the listed one.
    """
    whole = split_name(name).whole
    if sheet is not None:
        return spec_like(name, sheet.architecture, sheet)
    match = next((spec for spec in device_specs().values() if spec.name == whole), None)
    return None if match is None else spec_like(name, match.architecture)


def unlisted_sheet(spec: DeviceSpec) -> Datasheet | None:
    """Return the datasheet of a GPU, or of the whole of which it is a part; None if its name alone says as much."""
    listed = known_spec(split_name(spec.name).whole)
    return None if listed is not None and listed.sheet == spec.sheet else spec.sheet


def is_listed_card(spec: DeviceSpec) -> bool:
    """Return whether a GPU is the listed one of its name (`is_one_card`), so that its measured times hold for it.

    A GPU that no list names has only measurements of its own.
    """
    listed = known_spec(split_name(spec.name).whole)
    return listed is None or listed.sheet is None or spec.sheet is None or is_one_card(listed.sheet, spec.sheet)


def spec_like(name: str, architecture: str, sheet: Datasheet | None = None) -> DeviceSpec:
    """Return the spec of the GPU with this driver name, or of a part of it (`part_of`), or of its pose (`posed`).

    A GPU without a `sheet` that is not listed gets the spec of the first listed GPU of its architecture. If none has
    its architecture, it gets the spec of the first listed GPU. Either spec is marked as not measured.
    """
    whole, multiprocessors, pose = split_name(name)
    if pose:
        own = architecture if sheet is None else sheet.architecture
        return posed(spec_like(str(GpuName(whole, multiprocessors)), own, sheet), pose)
    if multiprocessors is not None:
        return part_of(spec_like(whole, architecture, sheet), multiprocessors)
    if sheet is not None:
        return replace(spec_of_sheet(sheet), name=name, architecture=architecture)
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
    peaks = {f.name: getattr(spec, f.name) * share for f in fields(DeviceSpec) if f.name.endswith("_tflops")}
    copy_gb_s, name = spec.copy_gb_s * min(1.0, _COPY_SHARE_OF_PART * share), str(GpuName(spec.name, multiprocessors))
    return replace(spec, name=name, multiprocessors=multiprocessors, measured=False, copy_gb_s=copy_gb_s, **peaks)


def restricted(spec: DeviceSpec, name: GpuName) -> DeviceSpec:
    """Return the part and the pose of the GPU `spec` that `name` asks for.

    Raises:
        MbcError: MBC286, the part is not possible; MBC288, the pose is not possible.
    """
    part = spec if name.multiprocessors is None else part_of(spec, name.multiprocessors)
    if not name.pose:
        return part
    _check_pose(part, name)
    return posed(part, name.pose)


def posed(spec: DeviceSpec, architecture: str) -> DeviceSpec:
    """Return the spec of the GPU while it poses as another architecture, which has that architecture's limits.

    Multiprocessors, clocks, memory and links stay those of the GPU. Libraries do not pose: their kernels remain those
    for the GPU itself. So the rates of matrix products stay, too, except in types that the architecture lacks.
    """
    name = split_name(spec.name)._replace(pose=architecture)
    pose = replace(spec, name=str(name), architecture=architecture, measured=False)
    return pose if pose.has_bf16_and_tf32 else replace(pose, bf16_tflops=spec.fp32_tflops, tf32_tflops=spec.fp32_tflops)


def _check_pose(spec: DeviceSpec, name: GpuName) -> None:
    """Raise an error if the GPU, or the part of it, cannot pose as `name` asks for.

    Raises:
        MbcError: MBC288, the architecture is unknown, or has instructions that the GPU lacks, or is its own.
    """
    if not (why := _obstacle(spec, name.pose)):
        return
    possible = [one for one in BUILDABLE if not _obstacle(spec, one)]
    remedy = f"choose another architecture: {', '.join(possible)}" if possible else ""
    if name.pose == spec.architecture or not possible:
        remedy = f"plan for the GPU as it is (--gpu {name._replace(pose='')})" + f", or {remedy}" * bool(remedy)
    raise MbcError("MBC288", f"{spec.name} ({spec.architecture}) cannot pose as {name.pose}, {why}", remedy)


def _obstacle(spec: DeviceSpec, architecture: str) -> str:
    """Return why the GPU cannot pose as the architecture; an empty text if it can."""
    if architecture not in BUILDABLE:
        return "which mbc does not know"
    if architecture == spec.architecture:
        return "which is its own architecture"
    lacking = [one.label for one in Instruction if has_instruction(architecture, one) and not spec.has(one)]
    return f"which has instructions that it lacks: {', '.join(lacking)}" if lacking else ""
