"""Figures of a card in a user's file (`--gpu card.json`) or in `data/gpus.json`, and what is wrong with them."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from mbc.errors import MbcError
from mbc.hardware.datasheet import (
    ARCHITECTURE,
    BUILDABLE,
    MULTIPROCESSORS,
    Datasheet,
    accumulation_of,
    capability_of,
    multiprocessor_of,
)
from mbc.units import show_rate

# Judgement: the driver keeps part of the memory. Error correction of GDDR memory takes a sixteenth. Of a memory that
# host and device share, the operating system keeps a part.
_USABLE_MEMORY, _USABLE_SHARED_MEMORY, _ECC_SHARE = 0.985, 0.935, 15 / 16
# Limits that no card reaches. Of all listed cards, the slowest reads its memory in 0.5 s, and the largest L2 cache has
# a 256th of the memory. A multiprocessor takes 64 bytes a clock from the L2 cache (Jia et al., "Dissecting the NVIDIA
# Volta GPU Architecture via Microbenchmarking", 2018).
_READING_S, _L2_SHARE, _BYTES_A_CLOCK = 2.0, 1 / 32, 64
# Published peaks of listed cards differ from computed ones by at most 3 %. The clock of a card by another maker may be
# higher than the published one.
_NEAR_PEAK = 0.1

# Fields of a file: its own names and units, and the least and largest value of numbers. Of all listed cards, the
# largest has 188 multiprocessors and the largest memory 279 GiB. Hardly a card has fewer than 512 CUDA cores.
_NEEDED = {
    "multiprocessors": (1, 512), "boost_mhz": (100, 10_000), "memory_gb": (0.5, 2048), "bandwidth_gb_s": (1, 1e5),
    "l2_kib": (64, 1 << 24), "pcie_generation": (1, 8), "pcie_lanes": (1, 16),
}  # fmt: skip
_FREE = {"tensor_mhz": (100, 10_000), "fp32_accumulation": (0.1, 1), "nvlink_gb_s": (0, 1e5), "shared_kib": (16, 4096)}
_PEAKS = {"fp32_tflops": (0, 1e6), "tensor_tflops": (0, 1e6)}  # of `published`
_LANES = (1, 2, 4, 8, 16)
_WHOLE = frozenset({"multiprocessors", "l2_kib", "pcie_generation", "pcie_lanes", "shared_kib"})
_TEXTS = ("name", "architecture")
_FLAGS = ("ecc", "integrated")
_NOTES = ("source", "sources", "page", "published", "published_source", "planning")  # on the figures
FIGURES = (*_NEEDED, *_FREE)
_UNITS = {"mhz": "MHz", "gb": "GiB", "s": "GB/s", "kib": "KiB", "tflops": "TFLOP/s"}  # by the last word of a figure
# Compute capabilities as people write them: 8.6, 86, SM86, compute_86.
_CAPABILITY = re.compile(r"(?:sm|compute(?:[-_ ]capability)?)?[-_ ]?(\d{1,2})[._]?(\d)[af]?", re.ASCII | re.IGNORECASE)
_MOST_DIGITS = 1000  # of a whole number; Python reads no more than 4,300, and every such number is too large
_MOST_SHOWN = 4
_EXAMPLE = "`mbc gpus rtx-3090 --json`"


class CardError(ValueError):
    """A figure that is missing, unknown, nonsense or contradicts others; the message names it.

    Attributes:
        remedy: What to do, as an imperative sentence.
    """

    def __init__(self, message: str, remedy: str) -> None:
        """Keep the remedy beside the message."""
        super().__init__(message)
        self.remedy = remedy


def sheet_of(row: Mapping[str, Any]) -> Datasheet:
    """Return the datasheet of a row of `data/gpus.json` or of a user's file.

    Raises:
        CardError: A field is missing, unknown or nonsense, or fields contradict each other.
    """
    _check(row)
    kept: dict[str, Any] = {key: row[key] for key in ("name", "architecture", "integrated", *FIGURES) if key in row}
    kept |= {key: int(kept[key]) for key in _WHOLE & set(kept)}
    kept["memory_bytes"] = int(kept.pop("memory_gb") * _usable(row) * (1 << 30))
    kept["l2_bytes"] = kept.pop("l2_kib") << 10
    kept["shared_bytes"] = kept.pop("shared_kib", 0) << 10
    kept.setdefault("fp32_accumulation", accumulation_of(row["name"]))
    sheet = Datasheet(**kept)
    _check_contradictions(row, sheet)
    _check_peaks(row.get("published", {}), sheet)
    return sheet


def row_of(sheet: Datasheet) -> dict[str, Any]:
    """Return the fields of a user's file that has this datasheet."""
    flags = {"integrated": True} if sheet.integrated else {}
    figures = {
        "multiprocessors": sheet.multiprocessors, "boost_mhz": sheet.boost_mhz,
        "memory_gb": round(sheet.memory_bytes / _usable(flags) / (1 << 30), 3),
        "bandwidth_gb_s": round(sheet.bandwidth_gb_s, 1), "l2_kib": sheet.l2_bytes >> 10,
        "pcie_generation": sheet.pcie_generation, "pcie_lanes": sheet.pcie_lanes, "tensor_mhz": sheet.tensor_mhz,
        "fp32_accumulation": sheet.fp32_accumulation, "nvlink_gb_s": sheet.nvlink_gb_s,
        "shared_kib": sheet.shared_bytes >> 10,
    }  # fmt: skip
    given = {key: value for key, value in figures.items() if value or key in _NEEDED}
    return {"name": sheet.name, "architecture": sheet.architecture, **given, **flags}


def unit_of(figure: str) -> str:
    """Return the unit of a figure; `memory_gb` is in GiB, as vendors count memory."""
    return _UNITS.get(figure.rpartition("_")[2], "")


def read_sheet(path: Path) -> tuple[Datasheet, Mapping[str, Any]]:
    """Return the datasheet in a user's file, and its fields as they are written.

    Raises:
        MbcError: MBC069, the file cannot be read, or a figure in it is missing, unknown, nonsense, or contradicts
            others.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        row = json.loads(text, object_pairs_hook=_without_repeats, parse_int=lambda text: int(text[:_MOST_DIGITS]))
        if not isinstance(row, dict):
            raise CardError("it is not one JSON object", _similar())
        fields = cast("dict[str, Any]", row)
        return sheet_of(fields), fields
    except (OSError, ValueError, RecursionError) as error:
        why, remedy = _explained(error)
        raise MbcError("MBC069", f"the datasheet '{path}' cannot be used: {why}", remedy) from error


def _explained(error: Exception) -> tuple[str, str]:
    """Return why a file could not be read, and what to do."""
    if isinstance(error, CardError):
        return str(error), error.remedy
    if isinstance(error, OSError):
        return error.strerror or str(error), "check the path, and whether you may read the file"
    if isinstance(error, json.JSONDecodeError):
        remedy = "correct it there: JSON has names in double quotes, no comments, and no comma after the last entry"
        return f"it is not JSON ({error})", remedy
    if isinstance(error, UnicodeDecodeError):
        return "it is not a text in UTF-8", "save it as plain text in UTF-8"
    return "it cannot be read as JSON", _similar()


def _similar() -> str:
    return f"begin with the datasheet of a similar card: {_EXAMPLE} writes all figures of an RTX 3090"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if repeated := sorted(key for key in set(keys) if keys.count(key) > 1):
        raise CardError(
            f"'{repeated[0]}' is given {keys.count(repeated[0])} times", "keep the right one of these lines"
        )
    return dict(pairs)


def _usable(row: Mapping[str, Any]) -> float:
    """Return the share of the memory that the driver reports."""
    share = _USABLE_SHARED_MEMORY if row.get("integrated") else _USABLE_MEMORY
    return share * (_ECC_SHARE if row.get("ecc") else 1.0)


def _check(row: Mapping[str, Any]) -> None:
    """Raise a CardError if a field is missing, unknown, or nonsense whatever the others are."""
    _check_keys(row, "a figure of a card", (*_TEXTS, *FIGURES, *_FLAGS), _NOTES)
    if missing := [key for key in ("name", "architecture", *_NEEDED) if key not in row]:
        raise CardError(f"it lacks {', '.join(missing)}", _similar())
    _check_architecture(row["architecture"])
    name = row["name"]
    if not isinstance(name, str) or not name.strip() or len(name) > 100 or not name.isprintable():
        raise CardError("'name' is not a short text", "write the name of the card, with at most 100 characters")
    if "@" in name:
        raise CardError("'name' has an @, which divides a GPU into parts", "write the name of the whole card")
    for key in _FLAGS:
        if not isinstance(row.get(key, False), bool):
            raise CardError(f"'{key}' is not true or false", f"write {json.dumps(key)}: true, or leave it out")
    for key, limits in (_NEEDED | _FREE).items():
        if key in row:
            _check_number(key, row[key], limits, row["architecture"])
    if row["pcie_lanes"] not in _LANES:
        lanes = ", ".join(map(str, _LANES))
        raise CardError(f"'pcie_lanes' is {row['pcie_lanes']}; it has to be one of {lanes}", "correct 'pcie_lanes'")
    for note, what, keys in (("published", "a published peak", tuple(_PEAKS)), ("sources", "a figure", FIGURES)):
        if not isinstance(row.get(note, {}), Mapping):
            raise CardError(f"'{note}' is not a JSON object", f"leave '{note}' out: plans do not need it")
        _check_keys(row.get(note, {}), what, keys, place=f" in '{note}'")
    for key in row.get("published", {}):
        _check_number(key, row["published"][key], _PEAKS[key], row["architecture"])


def _check_keys(
    row: Mapping[str, Any], what: str, keys: tuple[str, ...], notes: tuple[str, ...] = (), place: str = ""
) -> None:
    """Raise a CardError with the nearest of `keys`, or of `notes` that are very near, for a key that is neither."""
    if unknown := sorted(set(row) - {*keys, *notes}):
        given = unknown[0].lower().replace("-", "_").replace(" ", "_")
        near = difflib.get_close_matches(given, keys, 1) or difflib.get_close_matches(given, notes, 1, 0.8)
        shown = f"'{unknown[0]}'{place} is not {what}"
        if near:
            raise CardError(shown, f"did you mean '{near[0]}'?")
        raise CardError(f"{shown}; there are {', '.join(keys)}", "write one of these names, or leave the entry out")


def _check_architecture(given: Any) -> None:
    """Raise a CardError if the architecture is none that mbc has data on."""
    if isinstance(given, str) and ARCHITECTURE.fullmatch(given) and capability_of(given) in MULTIPROCESSORS:
        return
    shown = _shown(given)
    match = _CAPABILITY.fullmatch(str(given).strip())
    if match is not None and (meant := f"sm_{match[1]}{match[2]}") in BUILDABLE and meant != given:
        raise CardError(f"'architecture' is {shown}, not an architecture such as sm_86", f'write "{meant}"')
    raise CardError(
        f"'architecture' is {shown}, none of the architectures {', '.join(BUILDABLE)}",
        'write one of these: "sm_86" for compute capability 8.6',
    )


def _check_number(key: str, value: Any, limits: tuple[float, float], architecture: str) -> None:
    low, high = limits
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and (key not in _WHOLE or value == int(value)):
        return
    kind = "a whole number" if key in _WHOLE else "a number"
    limit = f"from {low:.10g} to {high:.10g} {unit_of(key)}".rstrip()
    remedy = f"correct '{key}': {_EXAMPLE} writes the figures of an RTX 3090 in these units"
    if key == "multiprocessors" and isinstance(value, int) and value > high:
        cores = multiprocessor_of(architecture).fp32_lanes
        if value % cores == 0 and value // cores <= high:
            remedy = (
                f"write {value // cores} if the card has {value:,} CUDA cores: a multiprocessor of {architecture} has "
                f"{cores} of them"
            )
    raise CardError(f"'{key}' is {_shown(value)}; it has to be {kind} {limit}", remedy)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_contradictions(row: Mapping[str, Any], sheet: Datasheet) -> None:
    """Raise a CardError if a figure has a value that it has on no card with these other figures."""
    clocked_gb_s = _BYTES_A_CLOCK * sheet.multiprocessors * sheet.boost_mhz * 1e-3
    shared_kib = multiprocessor_of(sheet.architecture).shared_kib
    for key, low, high, others in (
        ("bandwidth_gb_s", row["memory_gb"] / _READING_S, math.inf, ("memory_gb",)),
        ("bandwidth_gb_s", 0, clocked_gb_s, ("multiprocessors", "boost_mhz")),
        ("l2_kib", 0, _L2_SHARE * row["memory_gb"] * (1 << 20), ("memory_gb",)),
        ("tensor_mhz", 0, sheet.boost_mhz, ("boost_mhz",)),
        ("shared_kib", 0, shared_kib, ("architecture",)),
        ("nvlink_gb_s", 0, sheet.bandwidth_gb_s, ("bandwidth_gb_s",)),
    ):
        if low <= row.get(key, low) <= high:
            continue
        given = " and ".join(f"'{other}' {row[other]} {unit_of(other)}".rstrip() for other in others)
        limit = f"at least {show_rate(low)}" if row[key] < low else f"at most {show_rate(high)}"
        raise CardError(
            f"'{key}' is {row[key]:.10g} {unit_of(key)}, but a card with {given} has {limit} {unit_of(key)}",
            f"correct {' or '.join(repr(one) for one in (key, *others))}",
        )


def _check_peaks(published: Mapping[str, float], sheet: Datasheet) -> None:
    """Raise a CardError if a published peak differs from the one that follows from the figures."""
    cores = multiprocessor_of(sheet.architecture).fp32_lanes
    for key, peak in published.items():
        if _agrees(sheet, key, peak):
            continue
        alike = [
            one for one in BUILDABLE if all(_agrees(replace(sheet, architecture=one), *it) for it in published.items())
        ]
        fitting = f" ({_first_of(alike)} would fit)" if alike else ""
        remedy = (
            f"correct 'multiprocessors', 'architecture'{fitting} or the clock, or leave out 'published' of another card"
        )
        if key == "fp32_tflops":
            which, mhz = f"with {cores} CUDA cores each", sheet.boost_mhz
            if _agrees(sheet, key, peak * cores):
                remedy = (
                    f"write 'multiprocessors' {sheet.multiprocessors // cores}: {sheet.multiprocessors} are CUDA cores"
                )
        else:
            which, mhz = f"with 'fp32_accumulation' {sheet.fp32_accumulation:g}", sheet.tensor_mhz or sheet.boost_mhz
            if _agrees(replace(sheet, fp32_accumulation=0.5), key, peak):
                remedy = "write 'fp32_accumulation' 0.5, or leave 'published' out"
            elif any(_agrees(sheet, key, peak / factor) for factor in (2, 4)):
                remedy = (
                    "write the dense peak with fp32 accumulation, or leave 'published' out: sparsity doubles a "
                    "published peak, and so does accumulation in fp16"
                )
        raise CardError(
            f"'published' has {peak:g} TFLOP/s as '{key}', but {sheet.multiprocessors} multiprocessors of "
            f"{sheet.architecture} {which} reach {show_rate(_peak_of(sheet, key))} TFLOP/s at {mhz:g} MHz",
            remedy,
        )


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_SHOWN]) + " and others" * (len(names) > _MOST_SHOWN)


def _agrees(sheet: Datasheet, key: str, peak: float) -> bool:
    return abs(_peak_of(sheet, key) - peak) <= _NEAR_PEAK * peak


def _peak_of(sheet: Datasheet, key: str) -> float:
    """Return the peak of `published` with this name as it follows from the figures."""
    return sheet.fp32_tflops if key == "fp32_tflops" else sheet.fp16_tflops
