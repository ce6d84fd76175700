"""What is known of a GPU without having it: the datasheet and, where it was measured, the ceilings."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from mbc.errors import MbcError
from mbc.resources import data_text


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One GPU. Rates are dense peaks; `copy_gb_s` and `matrix_tflops_bf16` are ceilings, measured where `measured`.

    `overhead_bytes` is the device memory outside the arena after a first step, the bare context included; 0 when it
    was never measured.
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
    measured: bool
    buildable: bool  # the CUDA toolkit still makes code for it


def device_specs() -> dict[str, DeviceSpec]:
    """Every GPU known, by its short name."""
    known = {f.name for f in fields(DeviceSpec)}
    rows = json.loads(data_text("gpus.json"))
    return {key: DeviceSpec(**{k: v for k, v in row.items() if k in known}) for key, row in rows.items()}


def find_spec(name: str) -> DeviceSpec:
    """The GPU called `name`; MBC070 with the known names when there is none."""
    specs = device_specs()
    key = name.lower().replace("nvidia", "").strip().replace(" ", "-")
    if key in specs:
        return specs[key]
    raise MbcError("MBC070", f"unknown GPU '{name}'", f"choose one of {', '.join(specs)}")
