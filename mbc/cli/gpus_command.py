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
        print(json.dumps({"known": listed, "here": placed, "estimates": estimates}, indent=2))
        return 0
    width, named = max(map(len, specs)), max(len(spec.name) for spec in specs.values())
    print(f"{'--gpu':<{width}}  {'GPU':<{named}} architecture    memory        copy           fp16  figures")
    for name, spec in specs.items():
        figures = "measured" if spec.measured else "datasheet"
        if name in profiles:
            figures += "; kernels measured (bundled profile)"
        elif spec.architecture in {specs[profiled].architecture for profiled in profiles}:
            figures += "; kernels scaled from the measured GPU most like it"
        note = "" if spec.buildable else ", plan only: the CUDA 13 toolkit makes no code for it"
        print(
            f"{name:<{width}}  {spec.name:<{named}} {spec.architecture:<12} {show_size(spec.memory_bytes):>9}  "
            f"{show_rate(spec.copy_gb_s):>5} GB/s  {_tflops(spec.fp16_tflops)}  {figures}{note}"
        )
    print("\nfp16: peak rate of matrix products in fp16 with fp32 accumulation (`mbc gpus NAME`: other precisions)\n")
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
    """Print the figures of one GPU, with their sources if the GPU is listed, and the limits that plans use.

    As JSON, print the file for --gpu that describes the GPU. No file describes a part or a pose: their limits are
    printed instead. The GPU `auto` is that of this machine, whose figures are the driver's if it is not listed.

    Raises:
        MbcError: MBC070, no GPU has this name, or this machine has none that `auto` could mean; or as `find_device`.
    """
    from mbc.hardware.card_file import FIGURES, read_sheet, row_of, unit_of
    from mbc.hardware.datasheet import CARDS, FIGURE_SOURCES, multiprocessor_of
    from mbc.hardware.part import whole_name
    from mbc.hardware.spec import device_specs, find_spec
    from mbc.hardware.target import check_presence, find_device

    key, spec = whole_name(name), find_device(name)
    if key == "auto":
        check_presence()
    is_whole = name == key
    if key.endswith(".json"):
        (sheet, row), sources = read_sheet(Path(key)), None
    else:
        sheet = spec.sheet if key == "auto" else find_spec(key).sheet
        assert sheet is not None
        listed = next((key for key, one in device_specs().items() if one.sheet == sheet), "")
        key = listed or key
        row, sources = (CARDS[listed], FIGURE_SOURCES) if listed else (row_of(sheet), None)
    if as_json:
        file = {field: value for field, value in row.items() if field != "planning"}
        print(json.dumps(file if is_whole else asdict(spec), indent=2))
        return 0
    asked = f"{key}{name.removeprefix(whole_name(name))}"
    print(f"{spec.name} ({asked}), {spec.architecture}\n")
    for figure in (name for name in row if name in FIGURES):
        source = "" if sources is None else sources[row.get("sources", {}).get(figure, row["source"])]
        print(f"{figure:<17} {row[figure]:>9g} {unit_of(figure):<7} {source}".rstrip())
    if sources and "page" in row:
        print(f"{'':<35} {row['page']}")
    published, has_tensor_cores = row.get("published", {}), multiprocessor_of(sheet.architecture).tensor_flops > 0
    for peak, field, rate in (
        ("fp32", "fp32_tflops", _tflops(sheet.fp32_tflops)),
        ("fp16, tensor cores", "tensor_tflops", _tflops(sheet.fp16_tflops, has_tensor_cores)),
    ):
        document = "" if sources is None else f", {sources[row['published_source']]}"
        beside = f" (published: {published[field]:g}{document})" if field in published else ""
        print(f"peak in {peak}: {rate.strip()}{beside}")
    print("\nLimits in plans (kernels reach a part of them):")
    for limit, value in (
        ("multiprocessors", f"{spec.multiprocessors:>5}"), ("memory", f"{show_size(spec.memory_bytes):>9}"),
        ("shared memory", f"{show_size(spec.shared_bytes_of_block):>9} a block"),
        ("copies", f"{show_rate(spec.copy_gb_s):>5} GB/s"), ("fp32", _tflops(spec.fp32_tflops)),
        ("tf32", _tflops(spec.tf32_tflops, spec.has_bf16_and_tf32)),
        ("bf16", _tflops(spec.bf16_tflops, spec.has_bf16_and_tf32)), ("fp16", _tflops(spec.fp16_tflops)),
    ):  # fmt: skip
        print(f"{limit:<17} {value}".rstrip())
    return 0


def _tflops(rate: float, has_unit: bool = True) -> str:
    """Return a peak rate of matrix products, right-aligned; a dash where the GPU has no unit for them."""
    return f"{show_rate(rate):>5} TFLOP/s" if has_unit else f"{'-':>5}{'':8}"
