"""GPUs of this machine as the driver describes them, so that a card that no list has is planned as what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mbc.hardware import driver_query
from mbc.hardware.datasheet import Datasheet, accumulation_of, multiprocessor_of, sheet_fault
from mbc.hardware.spec import DeviceSpec, device_specs, spec_of
from mbc.hardware.transfers import estimated_link

LIBRARY = "libcuda.so.1"
_PLACES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
_LANES = 16
_LEAST_GB_S = 1.0  # drivers of integrated GPUs give no clock of the memory; listed modules have its bandwidth
# A listed card and this one are of one kind if their memories differ by no more: error correction takes a sixteenth.
_NEAR_MEMORY = 0.1


@dataclass(frozen=True, slots=True)
class DriverCard:
    """One GPU that CUDA sees.

    Attributes:
        uuid: The identity that nvidia-smi shows, too.
        sheet: Its figures. The clock is the highest one, which may exceed the boost clock of a datasheet.
        is_slice: Whether MIG separates it from the rest of a GPU.
    """

    uuid: str
    sheet: Datasheet
    is_slice: bool = False


def driver_cards() -> tuple[DriverCard, ...]:
    """Return the GPUs that CUDA sees, in its order; none without a driver."""
    return _asked(LIBRARY, tuple(os.environ.get(name) for name in _PLACES))


@cache
def _asked(library: str, _environment: tuple[str | None, ...]) -> tuple[DriverCard, ...]:
    command = [sys.executable, "-I", str(Path(driver_query.__file__)), library]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        rows = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    cards = (_card(row) for row in rows)
    return tuple(card for card in cards if not sheet_fault(card.sheet))


def _card(row: dict[str, Any]) -> DriverCard:
    architecture = f"sm_{row['major']}{row['minor']}"
    # Each pin of the memory carries two bits in a cycle of the clock that the driver gives.
    bandwidth = 2 * row["memory_clock_khz"] * 1e3 * row["bus_bits"] / 8 * 1e-9
    sheet = Datasheet(
        row["name"], architecture, row["multiprocessors"], row["clock_khz"] * 1e-3, row["memory_bytes"],
        max(bandwidth, _LEAST_GB_S),
        row["l2_bytes"], multiprocessor_of(architecture).pcie_generation, _LANES,
        fp32_accumulation=accumulation_of(row["name"]), shared_bytes=row["shared_bytes"],
        integrated=bool(row["integrated"]),
    )  # fmt: skip
    return DriverCard(row["uuid"], sheet, " MIG " in row["name"])


def spec_of_card(card: Datasheet) -> DeviceSpec:
    """Return the spec of a card of this machine.

    The listed datasheet of its name holds, with all that was measured on such cards, unless the driver contradicts it:
    cards of one name may differ in multiprocessors and memory. What a driver does not know (the boost clock of matrix
    products, the rate with fp32 accumulation) is then still that of the listed card.
    """
    named = [spec for spec in device_specs().values() if spec.name == card.name and spec.sheet is not None]
    named.sort(key=lambda spec: abs(spec.memory_bytes - card.memory_bytes))
    for spec in named:
        if spec.multiprocessors == card.multiprocessors and _is_near(spec.memory_bytes, card.memory_bytes):
            return _with_link(replace(spec, memory_bytes=min(spec.memory_bytes, card.memory_bytes)), card)
    listed = named[0].sheet if named else _twin(card)
    if listed is None:
        return spec_of(card)
    better = replace(
        card, boost_mhz=listed.boost_mhz, tensor_mhz=listed.tensor_mhz, nvlink_gb_s=listed.nvlink_gb_s,
        fp32_accumulation=listed.fp32_accumulation,
    )  # fmt: skip
    return spec_of(replace(better, bandwidth_gb_s=listed.bandwidth_gb_s) if card.integrated else better)


def _is_near(one_bytes: int, other_bytes: int) -> bool:
    return abs(one_bytes - other_bytes) <= _NEAR_MEMORY * max(one_bytes, other_bytes)


def _twin(card: Datasheet) -> Datasheet | None:
    """Return the listed module like `card`: drivers call all modules of a family alike and do not know their memory."""
    sheets = (spec.sheet for spec in device_specs().values())
    alike = [s for s in sheets if s is not None and s.integrated and s.architecture == card.architecture]
    alike = [s for s in alike if card.integrated and s.multiprocessors == card.multiprocessors]
    return min(alike, key=lambda sheet: abs(sheet.memory_bytes - card.memory_bytes), default=None)


def _with_link(spec: DeviceSpec, card: Datasheet) -> DeviceSpec:
    """Return the spec with this machine's bus if that is slower than the bus of the datasheet."""
    assert spec.sheet is not None
    here, listed = (estimated_link(s.pcie_generation, s.pcie_lanes) for s in (card, spec.sheet))
    if here.to_device_gb_s >= listed.to_device_gb_s or spec.host_link != listed:
        return spec
    sheet = replace(spec.sheet, pcie_generation=card.pcie_generation, pcie_lanes=card.pcie_lanes)
    return replace(spec, host_link=here, sheet=sheet)
