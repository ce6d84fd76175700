"""The command `mbc gpus`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mbc.units import show_size, with_article


def run(arguments: argparse.Namespace) -> int:
    """List the GPUs that can be planned for, and those of this machine."""
    from mbc.hardware.numa import gpu_place
    from mbc.hardware.spec import device_specs
    from mbc.hardware.target import local_gpus
    from mbc.kernels.calibration import ALL, OTHER_GPU, calibration
    from mbc.profile.locate import bundled_path

    specs, here, fitted = device_specs(), local_gpus(), calibration()
    profiles = {name for name, spec in specs.items() if bundled_path(spec.name).is_file()}
    spread = fitted.spreads.get(ALL)
    if arguments.json:
        estimates = {
            "fitted_to": fitted.gpu,
            "measured": fitted.measured,
            "ratios": {name: asdict(ratio) for name, ratio in fitted.spreads.items()},
            "wider_elsewhere": OTHER_GPU,
        }
        listed = {name: {**asdict(spec), "bundled_profile": name in profiles} for name, spec in specs.items()}
        placed = [{**asdict(gpu), **asdict(gpu_place(gpu.bus_id))} for gpu in here]
        document = {"known": listed, "here": placed, "estimates": estimates}
        print(json.dumps(document, indent=2))
        return 0
    width = max(map(len, specs))
    print(f"{'--gpu':<{width}}  {'GPU':<28} {'architecture':<12} {'memory':>9}  {'copy':>9}  {'tf32':>11}  figures")
    for name, spec in specs.items():
        figures = "measured" if spec.measured else "datasheet"
        if name in profiles:
            figures += "; kernels measured (bundled profile)"
        elif spec.architecture in {specs[profiled].architecture for profiled in profiles}:
            figures += "; kernels scaled from the measured GPU most like it"
        note = "" if spec.buildable else ", plan only: the CUDA 13 toolkit makes no code for it"
        print(
            f"{name:<{width}}  {spec.name:<28} {spec.architecture:<12} {show_size(spec.memory_bytes):>9}  "
            f"{spec.copy_gb_s:>4.0f} GB/s  {spec.tf32_tflops:>4.0f} TFLOP/s  {figures}{note}"
        )
    print()
    if spread is not None:
        print(f"Times without a profile are estimated (~) by a model fitted to {fitted.gpu} ({fitted.measured}).")
        print(
            f"Among {spread.count} operations that the fit did not use, half have an error below {spread.error:.0%}, "
            f"nine in ten below {spread.error_high:.0%}."
        )
        print(f"Ranges of estimates for other GPUs are {OTHER_GPU:g} times as wide to either side.\n")
    for index, gpu in enumerate(here):
        print(
            f"here: GPU {index} is {with_article(gpu.name)} ({gpu.architecture}), {show_size(gpu.free_bytes)} of "
            f"{show_size(gpu.memory_bytes)} free, driver {gpu.driver}"
        )
        if place := str(gpu_place(gpu.bus_id)):
            print(f"      {place}")
    if not here:
        print("here: no GPU was found (mbc doctor says more)")
    return 0
