"""Datasheets of GPUs: the figures of one card, and the peak rates that follow from them.

Listed cards are in `data/gpus.json` with the source of each figure. A user's own card is a file of the same fields, and
the driver of this machine answers with them (`mbc.hardware.driver_card`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from mbc.errors import MbcError
from mbc.resources import data_text

OLDEST_CAPABILITY = 75  # Turing, the oldest that CUDA 13 and cuDNN for it support
# Judgement: the driver keeps part of the memory, and copies reach part of the bandwidth. Error correction of GDDR
# memory takes a sixteenth. Of a memory that host and device share, the operating system keeps a part.
_USABLE_MEMORY, _USABLE_SHARED_MEMORY, _ATTAINABLE_BANDWIDTH, _ECC_SHARE = 0.985, 0.935, 0.9, 15 / 16
_ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?", re.ASCII)
_LARGEST = 1e15
# Limits that no card reaches. Of all listed cards, the slowest reads its memory in 0.5 s, and the largest L2 cache has
# a 256th of the memory. A multiprocessor takes 64 bytes a clock from the L2 cache (Jia et al., "Dissecting the NVIDIA
# Volta GPU Architecture via Microbenchmarking", 2018). Sparsity and accumulation in fp16 each double a published peak.
_READING_S, _L2_SHARE, _BYTES_A_CLOCK, _PEAK_RATIO = 4.0, 1 / 32, 64, 5.0


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


# Fields of a file: its own names and units, and the least and largest value of numbers.
_NEEDED = {
    "multiprocessors": (1, 4096), "boost_mhz": (100, 10_000), "memory_gb": (0.5, 65_536), "bandwidth_gb_s": (1, 1e6),
    "l2_kib": (64, 1 << 24), "pcie_generation": (1, 8), "pcie_lanes": (1, 32),
}  # fmt: skip
_FREE = {"tensor_mhz": (100, 10_000), "fp32_accumulation": (0.1, 1), "nvlink_gb_s": (0, 1e5), "shared_kib": (16, 4096)}
_WHOLE = frozenset({"multiprocessors", "l2_kib", "pcie_generation", "pcie_lanes", "shared_kib"})
_TEXTS = frozenset({"name", "architecture"})
_FLAGS = frozenset({"ecc", "integrated"})
_NOTES = frozenset({"source", "sources", "page", "published", "published_source", "planning"})  # on the figures
FIGURES = (*_NEEDED, *_FREE)
_UNITS = {"mhz": "MHz", "gb": "GiB", "s": "GB/s", "kib": "KiB", "tflops": "TFLOP/s"}  # by the last word of a figure


def sheet_of(row: Mapping[str, Any]) -> Datasheet:
    """Return the datasheet of a row of `data/gpus.json` or of a user's file.

    Raises:
        ValueError: A field is missing, unknown or nonsense, or fields contradict each other; the message names them.
    """
    _check(row)
    kept: dict[str, Any] = {key: row[key] for key in ("name", "architecture", "integrated", *FIGURES) if key in row}
    share = _USABLE_SHARED_MEMORY if row.get("integrated") else _USABLE_MEMORY
    share *= _ECC_SHARE if row.get("ecc") else 1.0
    kept["memory_bytes"] = int(kept.pop("memory_gb") * share * (1 << 30))
    kept["l2_bytes"] = kept.pop("l2_kib") << 10
    kept["shared_bytes"] = kept.pop("shared_kib", 0) << 10
    kept.setdefault("fp32_accumulation", accumulation_of(row["name"]))
    sheet = Datasheet(**kept)
    _check_contradictions(row, sheet)
    return sheet


def unit_of(figure: str) -> str:
    """Return the unit of a figure; `memory_gb` is in GiB, as vendors count memory."""
    return _UNITS.get(figure.rpartition("_")[2], "")


def accumulation_of(name: str) -> float:
    """Return the rate with fp32 accumulation of a card whose datasheet is not listed: half for GeForce cards."""
    return 0.5 if "geforce" in name.lower() else 1.0


def _check(row: Mapping[str, Any]) -> None:
    if unknown := sorted(set(row) - set(FIGURES) - _TEXTS - _FLAGS - _NOTES):
        raise ValueError(f"'{unknown[0]}' is not a figure of a card; the figures are {', '.join(FIGURES)}")
    if missing := [key for key in ("name", "architecture", *_NEEDED) if key not in row]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for key in _TEXTS:
        if not isinstance(row[key], str) or not row[key].strip() or len(row[key]) > 100 or not row[key].isprintable():
            raise ValueError(f"'{key}' is not a short text")
    if "@" in row["name"]:
        raise ValueError("'name' has an @, which divides a GPU into parts")
    for key in _FLAGS & set(row):
        if not isinstance(row[key], bool):
            raise ValueError(f"'{key}' is not true or false")
    for key, (low, high) in (_NEEDED | _FREE).items():
        if key in row:
            _check_number(key, row[key], low, high)
    check_architecture(row["architecture"])


def _check_contradictions(row: Mapping[str, Any], sheet: Datasheet) -> None:
    """Raise a ValueError if a figure has a value that it has on no card with these other figures."""
    clocked_gb_s = _BYTES_A_CLOCK * sheet.multiprocessors * sheet.boost_mhz * 1e-3
    limits = {
        ("bandwidth_gb_s", "memory_gb", "multiprocessors", "boost_mhz"): (row["memory_gb"] / _READING_S, clocked_gb_s),
        ("l2_kib", "memory_gb"): (0, _L2_SHARE * row["memory_gb"] * (1 << 20)),
        ("tensor_mhz", "boost_mhz"): (0, sheet.boost_mhz),
        ("shared_kib", "architecture"): (0, multiprocessor_of(sheet.architecture).shared_kib),
        ("nvlink_gb_s", "bandwidth_gb_s"): (0, sheet.bandwidth_gb_s),
    }
    if not isinstance(row.get("published", {}), Mapping):
        raise ValueError("'published' does not hold peaks by their names")
    published: Mapping[str, Any] = row.get("published", {})
    figures = {**row, **{key: published[key] for key in ("fp32_tflops", "tensor_tflops") if key in published}}
    for key, peak in (("fp32_tflops", sheet.fp32_tflops), ("tensor_tflops", sheet.fp16_tflops)):
        _check_number(key, figures.get(key, 0), 0, _LARGEST)
        limits[key, "multiprocessors", "boost_mhz", "architecture"] = peak / _PEAK_RATIO, peak * _PEAK_RATIO
    for (key, *others), (low, high) in limits.items():
        if key in figures and not low <= figures[key] <= high:
            given = ", ".join(f"'{other}' {figures[other]} {unit_of(other)}".rstrip() for other in others)
            limit = f"from {low:.6g} to {high:.6g} {unit_of(key)}".rstrip()
            raise ValueError(f"'{key}' is {figures[key]:.10g}; with {given} it is {limit}")


def _check_number(key: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (key in _WHOLE and value != int(value)):
        kind = "a whole number" if key in _WHOLE else "a number"
        limit = f"from {low:.10g} to {high:.10g} {unit_of(key)}".rstrip()
        raise ValueError(f"'{key}' is {json.dumps(value)[:40]}; it has to be {kind} {limit}")


def check_architecture(architecture: str) -> None:
    """Raise a ValueError if the architecture is none that mbc has data on."""
    if not _ARCHITECTURE.fullmatch(architecture):
        raise ValueError(f"'{architecture}' is not an architecture such as sm_86")
    if capability_of(architecture) not in MULTIPROCESSORS:
        raise ValueError(f"'{architecture}' is none of the architectures {', '.join(BUILDABLE)}")


def sheet_fault(sheet: Datasheet) -> str:
    """Return which figure of a plan's datasheet is nonsense; an empty text if none is."""
    figures = {"memory_bytes", "l2_bytes", "fp32_accumulation", *_NEEDED} - {"memory_gb", "l2_kib"}
    if not _ARCHITECTURE.fullmatch(sheet.architecture):
        return "architecture"
    fault = next((key for key in sorted(figures) if not 0 < getattr(sheet, key) < _LARGEST), "")
    free = (sheet.tensor_mhz, sheet.nvlink_gb_s, sheet.shared_bytes)
    return fault or ("tensor_mhz" if any(not 0 <= value < _LARGEST for value in free) else "")


def read_sheet(path: Path) -> tuple[Datasheet, Mapping[str, Any]]:
    """Return the datasheet in a user's file, and its fields as they are written.

    Raises:
        MbcError: MBC069, the file cannot be read, or a figure in it is missing, unknown, nonsense, or contradicts
            others.
    """
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(row, dict):
            raise ValueError("it is not one JSON object")
        fields = cast("dict[str, Any]", row)
        return sheet_of(fields), fields
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"it is not JSON ({why})"
        raise MbcError(
            "MBC069",
            f"the datasheet '{path}' cannot be used: {why}",
            "begin with the one of a similar card: `mbc gpus rtx-3090 --json` writes all of its figures",
        ) from error
