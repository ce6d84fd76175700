"""Datasheets of GPUs: the figures of one card, and the peak rates that follow from them.

Listed cards are in `data/gpus.json` with the source of each figure. A user's own card is a file of the same fields
(`mbc.hardware.card_file`), and the driver of this machine answers with them (`mbc.hardware.driver_card`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mbc.resources import data_text

OLDEST_CAPABILITY = 75  # Turing, the oldest that CUDA 13 and cuDNN for it support
# Judgement: copies reach part of the bandwidth.
_ATTAINABLE_BANDWIDTH = 0.9
ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?", re.ASCII)
_LARGEST = 1e15
_POSITIVE = (
    "bandwidth_gb_s", "boost_mhz", "fp32_accumulation", "l2_bytes", "memory_bytes", "multiprocessors",
    "pcie_generation", "pcie_lanes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Rates of one multiprocessor of an architecture, and the limits of its kernels.

    Sources: CUDA C++ Programming Guide ("Technical Specifications", "Arithmetic Instructions"); the whitepapers of each
    architecture.

    Attributes:
        fp32_lanes: Fused multiply-adds in fp32 in a clock.
        tensor_flops: Dense operations of tensor cores in fp16 with fp32 accumulation in a clock, at full rate.
        shared_kib: Largest shared memory of a block.
        launch_us: Judgement: time from one node of a CUDA graph to the next.
        pcie_generation: Usual generation of the bus.
    """

    fp32_lanes: int
    tensor_flops: int
    shared_kib: int
    launch_us: float
    pcie_generation: int


_DATA: Mapping[str, Any] = MappingProxyType(json.loads(data_text("gpus.json")))
CARDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(_DATA["cards"])
FIGURE_SOURCES: Mapping[str, str] = MappingProxyType(_DATA["sources"])
# By compute capability in tenths.
MULTIPROCESSORS = MappingProxyType({int(key): Multiprocessor(**row) for key, row in _DATA["architectures"].items()})
# Architectures for which the CUDA toolkit makes code.
BUILDABLE = tuple(f"sm_{capability}" for capability in MULTIPROCESSORS if capability >= OLDEST_CAPABILITY)


def capability_of(architecture: str) -> int:
    """Return the compute capability of an architecture in tenths: 90 for "sm_90a"."""
    return int(architecture.removeprefix("sm_").rstrip("af"))


def multiprocessor_of(architecture: str) -> Multiprocessor:
    """Return what a multiprocessor of the architecture does, or of the newest listed architecture before it."""
    capability = capability_of(architecture)
    return MULTIPROCESSORS[max((c for c in MULTIPROCESSORS if c <= capability), default=min(MULTIPROCESSORS))]


@dataclass(frozen=True, slots=True)
class Datasheet:
    """Figures of one card, from which its limits follow.

    Attributes:
        name: Name, as the driver gives it.
        architecture: Architecture such as "sm_86".
        multiprocessors: Number of multiprocessors.
        boost_mhz: Boost clock of the multiprocessors.
        memory_bytes: Memory that the driver reports.
        bandwidth_gb_s: Bandwidth of the device memory.
        l2_bytes: Size of the L2 cache.
        pcie_generation: Generation of the bus.
        pcie_lanes: Lanes of the bus.
        tensor_mhz: Boost clock of matrix products, if lower; 0 for the boost clock.
        fp32_accumulation: Rate of tensor cores with fp32 accumulation, as a share of their full rate: 0.5 for GeForce.
        nvlink_gb_s: Rate between two GPUs in each direction; 0 for GPUs that only the bus connects.
        shared_bytes: Largest shared memory of a block; 0 for that of the architecture.
        integrated: Whether device and host share one memory.
    """

    name: str
    architecture: str
    multiprocessors: int
    boost_mhz: float
    memory_bytes: int
    bandwidth_gb_s: float
    l2_bytes: int
    pcie_generation: int
    pcie_lanes: int
    tensor_mhz: float = 0.0
    fp32_accumulation: float = 1.0
    nvlink_gb_s: float = 0.0
    shared_bytes: int = 0
    integrated: bool = False

    @property
    def copy_gb_s(self) -> float:
        """Rate at which kernels read and write device memory."""
        return self.bandwidth_gb_s * _ATTAINABLE_BANDWIDTH

    @property
    def fp32_tflops(self) -> float:
        """Peak rate in fp32 without tensor cores."""
        return self.multiprocessors * multiprocessor_of(self.architecture).fp32_lanes * 2 * self.boost_mhz * 1e-6

    @property
    def fp16_tflops(self) -> float:
        """Peak rate of matrix products in fp16 with fp32 accumulation: dense, on tensor cores."""
        flops = multiprocessor_of(self.architecture).tensor_flops * self.fp32_accumulation
        tensor = self.multiprocessors * flops * (self.tensor_mhz or self.boost_mhz) * 1e-6
        return max(tensor, self.fp32_tflops)

    @property
    def bf16_tflops(self) -> float:
        """Peak rate of matrix products in bf16; the rate of fp32 where tensor cores lack bf16."""
        return self.fp16_tflops if capability_of(self.architecture) >= 80 else self.fp32_tflops

    @property
    def tf32_tflops(self) -> float:
        """Peak rate of matrix products in tf32: half of the rate in bf16, and at least the rate in fp32."""
        return max(self.bf16_tflops / 2, self.fp32_tflops)


def accumulation_of(name: str) -> float:
    """Return the rate with fp32 accumulation of a card whose datasheet is not listed: half for GeForce cards."""
    return 0.5 if "geforce" in name.lower() else 1.0


def sheet_fault(sheet: Datasheet) -> str:
    """Return which figure of a plan's datasheet is nonsense; an empty text if none is."""
    if not ARCHITECTURE.fullmatch(sheet.architecture):
        return "architecture"
    fault = next((key for key in _POSITIVE if not 0 < getattr(sheet, key) < _LARGEST), "")
    free = (sheet.tensor_mhz, sheet.nvlink_gb_s, sheet.shared_bytes)
    return fault or ("tensor_mhz" if any(not 0 <= value < _LARGEST for value in free) else "")
