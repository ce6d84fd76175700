"""`mbc gpus`"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mbc.units import show_size


def run(arguments: argparse.Namespace) -> int:
    """List known GPUs and those of this machine."""
    from mbc.device.spec import device_specs
    from mbc.device.target import local_gpus

    specs, here = device_specs(), local_gpus()
    if arguments.json:
        known = {name: asdict(spec) for name, spec in specs.items()}
        print(json.dumps({"known": known, "here": [asdict(gpu) for gpu in here]}, indent=2))
        return 0
    width = max(map(len, specs))
    print(f"{'--gpu':<{width}}  {'GPU':<28} {'architecture':<12} {'memory':>9}  {'copy':>9}  {'tf32':>11}  figures")
    for name, spec in specs.items():
        figures = "measured" if spec.measured else "datasheet"
        note = "" if spec.buildable else ", plan only: the CUDA 13 toolkit makes no code for it"
        print(
            f"{name:<{width}}  {spec.name:<28} {spec.architecture:<12} {show_size(spec.memory_bytes):>9}  "
            f"{spec.copy_gb_s:>4.0f} GB/s  {spec.tf32_tflops:>4.0f} TFLOP/s  {figures}{note}"
        )
    print()
    for index, gpu in enumerate(here):
        print(
            f"here: GPU {index} is an {gpu.name} ({gpu.architecture}), {show_size(gpu.free_bytes)} of "
            f"{show_size(gpu.memory_bytes)} free, driver {gpu.driver}"
        )
    if not here:
        print("here: no GPU was found (mbc doctor says more)")
    return 0
