"""The command `mbc gpus`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mbc.units import show_rate, show_size, with_article

if TYPE_CHECKING:
    from mbc.hardware.target import LocalGpu

_UNITS = {"mhz": "MHz", "gb": "GB", "s": "GB/s", "kib": "KiB"}  # of figures, by the last word of their names


def run(arguments: argparse.Namespace) -> int:
    """List the GPUs that can be planned for, and those of this machine."""
    if arguments.card is not None:
        return _show(arguments.card, arguments.json)
    from mbc.hardware.numa import gpu_place
    from mbc.hardware.spec import device_specs
    from mbc.hardware.target import current_gpu, local_gpus, sharing_text
    from mbc.kernels.calibration import ALL, OTHER_GPU, calibration
    from mbc.profile.paths import bundled_path

    specs, here, fitted = device_specs(), local_gpus(), calibration()
    profiles = {name for name, spec in specs.items() if bundled_path(spec.name).is_file()}
    spread = fitted.spreads.get(ALL)
    if arguments.json:
        estimates = {
            "fitted_to": fitted.gpu, "measured": fitted.measured, "posed": fitted.posed, "wider_elsewhere": OTHER_GPU,
            "ratios": {name: asdict(ratio) for name, ratio in fitted.spreads.items()},
        }  # fmt: skip
        listed = {name: {**asdict(spec), "bundled_profile": name in profiles} for name, spec in specs.items()}
        placed = [{**asdict(gpu), **asdict(gpu_place(gpu.bus_id))} for gpu in here]
        document = {"known": listed, "here": placed, "estimates": estimates}
        print(json.dumps(document, indent=2))
        return 0
    width, named = max(map(len, specs)), max(len(spec.name) for spec in specs.values())
    print(
        f"{'--gpu':<{width}}  {'GPU':<{named}} {'architecture':<12} {'memory':>9}  {'copy':>10}  {'tf32':>12}  figures"
    )
    for name, spec in specs.items():
        figures = "measured" if spec.measured else "datasheet"
        if name in profiles:
            figures += "; kernels measured (bundled profile)"
        elif spec.architecture in {specs[profiled].architecture for profiled in profiles}:
            figures += "; kernels scaled from the measured GPU most like it"
        note = "" if spec.buildable else ", plan only: the CUDA 13 toolkit makes no code for it"
        print(
            f"{name:<{width}}  {spec.name:<{named}} {spec.architecture:<12} {show_size(spec.memory_bytes):>9}  "
            f"{show_rate(spec.copy_gb_s):>5} GB/s  {show_rate(spec.tf32_tflops):>5} TFLOP/s  {figures}{note}"
        )
    print()
    if spread is not None:
        print(f"Times without a profile are estimated (~) by a model fitted to {fitted.gpu} ({fitted.measured}).")
        print(
            f"Among {spread.count} operations that the fit did not use, half have an error below {spread.error:.0%}, "
            f"nine in ten below {spread.error_high:.0%}."
        )
        posed = f"are fitted to {fitted.posed}" if fitted.posed else "are judgements: none was measured yet"
        print(f"Shares of mbc's kernels for GPUs without wgmma {posed}.")
        print(f"Ranges of estimates for other GPUs are {OTHER_GPU:g} times as wide to either side. Where a GPU has no")
        print("measured or scaled times at all, the range is that of a whole step (docs/estimates.md).\n")
    for index, gpu in enumerate(here):
        print(
            f"here: GPU {index} is {with_article(gpu.name)} ({gpu.architecture}), {show_size(gpu.free_bytes)} of "
            f"{show_size(gpu.memory_bytes)} free, driver {gpu.driver}"
        )
        for note in (_by_the_driver(gpu), sharing_text(gpu), str(gpu_place(gpu.bus_id))):
            if note:
                print(f"      {note}")
    if len({gpu.name for gpu in here}) > 1 and (first := current_gpu()) is not None:
        print(f"      --gpu auto plans for the first GPU that CUDA sees, {first.name} (CUDA_VISIBLE_DEVICES)")
    if not here:
        print("here: no GPU was found (mbc doctor says more)")
    return 0


def _by_the_driver(gpu: LocalGpu) -> str:
    """Say what the driver says of a GPU, and from which figures plans for it are made."""
    from mbc.hardware.driver_card import spec_of_card
    from mbc.hardware.spec import unlisted_sheet

    card = gpu.card
    if card is None:
        return "CUDA does not see it: CUDA_VISIBLE_DEVICES hides it, or the driver's library does not load"
    basis = "its datasheet" if unlisted_sheet(spec_of_card(card)) is None else "the driver's figures"
    return (
        f"{card.multiprocessors} multiprocessors up to {card.boost_mhz:.0f} MHz, {show_rate(card.bandwidth_gb_s)} "
        f"GB/s, {show_size(card.l2_bytes)} of L2 cache, {show_size(card.shared_bytes)} of shared memory a block, "
        f"PCIe {card.pcie_generation}.0 x{card.pcie_lanes}; plans use {basis}"
    )


def _show(name: str, as_json: bool) -> int:
    """Print the figures of one GPU, those of a listed one with their sources, or its row as a file for --gpu."""
    from mbc.hardware.datasheet import CARDS, FIGURE_SOURCES, FIGURES, read_sheet, sheet_of
    from mbc.hardware.spec import device_specs, find_spec

    if name.endswith(".json"):
        (sheet, row), key, sources = read_sheet(Path(name)), name, None
    else:
        spec = find_spec(name)
        key = next(key for key, one in device_specs().items() if one is spec)
        sheet, row, sources = sheet_of(CARDS[key]), CARDS[key], FIGURE_SOURCES
    if as_json:
        print(json.dumps({field: value for field, value in row.items() if field != "planning"}, indent=2))
        return 0
    print(f"{sheet.name} ({key}), {sheet.architecture}\n")
    for figure in (name for name in row if name in FIGURES):
        unit = _UNITS.get(figure.rpartition("_")[2], "")
        source = "" if sources is None else sources[row.get("sources", {}).get(figure, row["source"])]
        print(f"{figure:<16} {row[figure]:>9g} {unit:<5} {source}".rstrip())
    if sources and "page" in row:
        print(f"{'':<32} {row['page']}")
    published = row.get("published", {})
    for peak, field, rate in (
        ("fp32", "fp32_tflops", sheet.fp32_tflops),
        ("fp16, tensor cores", "tensor_tflops", sheet.fp16_tflops),
    ):
        document = "" if sources is None else f", {sources[row['published_source']]}"
        beside = f" (published: {published[field]:g}{document})" if field in published else ""
        print(f"peak in {peak}: {rate:.1f} TFLOP/s{beside}")
    return 0
