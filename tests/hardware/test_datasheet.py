"""Datasheets: figures with their sources, peaks that follow from them, and files of users."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.hardware.datasheet import (
    CARDS,
    FIGURE_SOURCES,
    MULTIPROCESSORS,
    OLDEST_CAPABILITY,
    capability_of,
    read_sheet,
    sheet_of,
)
from mbc.hardware.spec import DeviceSpec, device_specs, find_spec, known_spec, spec_of
from mbc.hardware.target import find_device

CURRENT = {key for key, row in CARDS.items() if capability_of(row["architecture"]) >= OLDEST_CAPABILITY}
_NO_FIGURES = {"name", "architecture", "ecc", "integrated", "page", "source", "sources", "published_source", "planning"}


def test_the_cards_that_people_train_on_are_listed() -> None:
    assert len(CURRENT) >= 60
    assert {capability_of(CARDS[key]["architecture"]) for key in CURRENT} == {
        c for c in MULTIPROCESSORS if c >= OLDEST_CAPABILITY
    }


@pytest.mark.parametrize("key", CARDS)
def test_each_figure_has_a_source(key: str) -> None:
    row = CARDS[key]
    of_figures = row.get("sources", {})
    assert set(of_figures) <= set(row) - _NO_FIGURES
    assert {row["source"], row["published_source"], *of_figures.values()} <= set(FIGURE_SOURCES)
    assert (row["source"] == "tpu") <= row.get("page", "").startswith("https://www.techpowerup.com/gpu-specs/")


@pytest.mark.parametrize("key", sorted(CURRENT))
def test_figures_follow_from_the_datasheet_within_3_percent(key: str) -> None:
    row, spec = CARDS[key], device_specs()[key]
    assert spec.sheet is not None
    derived = {"fp32_tflops": spec.sheet.fp32_tflops, "tensor_tflops": spec.sheet.fp16_tflops}
    for peak, published in row["published"].items():
        assert derived[peak] == pytest.approx(published, rel=0.03), peak
    share = (0.94 if row.get("integrated") else 1) * (15 / 16 if row.get("ecc") else 1)
    assert spec.memory_bytes / 2**30 == pytest.approx(row["memory_gb"] * share, rel=0.03)
    assert 0.8 * row["bandwidth_gb_s"] < spec.copy_gb_s < row["bandwidth_gb_s"]
    assert spec.fp32_tflops <= spec.tf32_tflops <= max(spec.bf16_tflops, spec.fp32_tflops)
    assert spec.bf16_tflops <= spec.fp16_tflops


def test_geforce_cards_accumulate_in_fp32_at_half_rate() -> None:
    for key in CURRENT:
        if "GeForce" in CARDS[key]["name"]:
            assert CARDS[key]["fp32_accumulation"] == 0.5, key
    assert find_spec("rtx-3090").fp16_tflops < find_spec("rtx-a5000").fp16_tflops
    assert find_spec("t4").bf16_tflops == find_spec("t4").fp32_tflops < find_spec("t4").fp16_tflops


CARD: dict[str, Any] = {
    "name": "My card", "architecture": "sm_86", "multiprocessors": 28, "boost_mhz": 1777, "memory_gb": 12,
    "bandwidth_gb_s": 360, "l2_kib": 3072, "pcie_generation": 4, "pcie_lanes": 16,
}  # fmt: skip


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(CARD | {"shared_kib": 64}))
    device = find_device(str(path))
    assert (device.name, device.multiprocessors, device.shared_bytes_of_block) == ("My card", 28, 64 << 10)
    assert device == spec_of(read_sheet(path)[0])
    assert device.fp16_tflops == 2 * sheet_of(CARD | {"name": "GeForce of mine"}).fp16_tflops
    assert find_device(f"{path}@8").multiprocessors == 8


def _saved(path: Path, key: str, **changes: Any) -> DeviceSpec:
    """Return the GPU of a listed card's file (`mbc gpus KEY --json`), with changes."""
    path.write_text(json.dumps({k: v for k, v in CARDS[key].items() if k != "planning"} | changes))
    return find_device(str(path))


def test_the_file_of_a_listed_card_is_that_card(tmp_path: Path) -> None:
    """Measured rates are no figures of a card, and yet hold for the file of a listed card."""
    for key, spec in device_specs().items():
        assert _saved(tmp_path / "card.json", key) == spec, key


def test_the_file_of_a_listed_card_with_other_figures(tmp_path: Path) -> None:
    path, listed = tmp_path / "card.json", find_spec("h200")
    smaller = _saved(path, "h200", memory_gb=80)
    assert smaller.memory_bytes < 80 << 30
    assert replace(smaller, memory_bytes=listed.memory_bytes, sheet=listed.sheet) == listed
    assert known_spec(smaller.name, smaller.sheet) == smaller, "a plan keeps only the figures"
    slower = _saved(path, "h200", pcie_generation=3)
    assert 3 * slower.host_link.to_device_gb_s < listed.host_link.to_device_gb_s
    assert replace(slower, host_link=listed.host_link, peer_link=listed.peer_link, sheet=listed.sheet) == listed
    for change in ({"boost_mhz": 1900}, {"name": "Mine"}, {"fp32_accumulation": 0.5}):
        other = _saved(path, "h200", **change)
        assert other == spec_of(read_sheet(path)[0]) and other.copy_gb_s != listed.copy_gb_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not JSON (Expecting value"),
        ({"l2_kib": 1.5}, "'l2_kib' is 1.5; it has to be a whole number from 64 to 16777216"),
        ("[1]", "it is not one JSON object"),
        ("{}", "it lacks name, architecture, multiprocessors, boost_mhz"),
        ({"multiprocessors": 0}, "'multiprocessors' is 0; it has to be a whole number from 1 to 4096"),
        ({"multiprocessors": 2.5}, "'multiprocessors' is 2.5; it has to be a whole number"),
        ({"memory_gb": "12"}, "'memory_gb' is \"12\"; it has to be a number from 0.5 to 65536 GiB"),
        ({"memory_gb": 12884901888}, "'memory_gb' is 12884901888; it has to be a number"),
        ({"boost_mhz": float("nan")}, "'boost_mhz' is NaN; it has to be a number"),
        ({"boost_mhz": 10**400}, "int too large to convert to float"),
        ({"boost_mhz": True}, "'boost_mhz' is true; it has to be a number"),
        ({"tensor_mhz": -1}, "'tensor_mhz' is -1; it has to be a number"),
        ({"architecture": "ampere"}, "'ampere' is not an architecture such as sm_86"),
        ({"architecture": "sm_999"}, "'sm_999' is none of the architectures sm_75, sm_80"),
        ({"architecture": 86}, "'architecture' is not a short text"),
        ({"name": ""}, "'name' is not a short text"),
        ({"name": "a@b"}, "'name' has an @"),
        ({"ecc": 1}, "'ecc' is not true or false"),
        ({"cores": 3584}, "'cores' is not a figure of a card; the figures are multiprocessors"),
        ({"memory_gb": 12288}, "'bandwidth_gb_s' is 360; with 'memory_gb' 12288 GiB, 'multiprocessors' 28, "),
        ({"bandwidth_gb_s": 1.8}, "'bandwidth_gb_s' is 1.8; with 'memory_gb' 12 GiB,"),
        ({"multiprocessors": 1}, "'multiprocessors' 1, 'boost_mhz' 1777 MHz it is from 3 to 113.728 GB/s"),
        ({"bandwidth_gb_s": 360_000}, "'bandwidth_gb_s' is 360000; with"),
        ({"l2_kib": 3072 << 10}, "'l2_kib' is 3145728; with 'memory_gb' 12 GiB it is from 0 to 393216 KiB"),
        ({"tensor_mhz": 1800}, "'tensor_mhz' is 1800; with 'boost_mhz' 1777 MHz it is from 0 to 1777 MHz"),
        ({"shared_kib": 100}, "'shared_kib' is 100; with 'architecture' sm_86 it is from 0 to 99"),
        ({"nvlink_gb_s": 450}, "'nvlink_gb_s' is 450; with 'bandwidth_gb_s' 360 GB/s it is from 0 to 360 GB/s"),
        (
            {"published": {"tensor_tflops": 900}},
            "'tensor_tflops' is 900; with 'multiprocessors' 28, 'boost_mhz' 1777 MHz",
        ),
        ({"published": "fp32_tflops"}, "'published' does not hold peaks by their names"),
        ({"published": {"tensor_tflops": None}}, "'tensor_tflops' is null; it has to be a number"),
        ({"published": {"fp32_tflops": "12"}}, "'fp32_tflops' is \"12\"; it has to be a number"),
    ],
)
def test_a_file_with_nonsense(tmp_path: Path, text: str | dict[str, Any], said: str) -> None:
    path = tmp_path / "card.json"
    path.write_text(text if isinstance(text, str) else json.dumps(CARD | text))
    with pytest.raises(MbcError, match=r"MBC069: the datasheet '.*card.json' cannot be used: ") as caught:
        read_sheet(path)
    assert said in caught.value.message and "mbc gpus rtx-3090 --json" in caught.value.remedy


@pytest.mark.parametrize("notes", [{"tensor_mhz": "1700"}, {"nvlink_gb_s": None}, {"shared_kib": 200}])
def test_other_notes_on_a_card_are_none_of_its_figures(tmp_path: Path, notes: dict[str, Any]) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(CARD | {"published": notes}))
    assert read_sheet(path)[0] == sheet_of(CARD)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MbcError, match=r"MBC069: .* cannot be used: No such file"):
        find_device(str(tmp_path / "card.json"))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX 3060", "rtx-3060"), ("rtx-3060", "rtx-3060"), ("3060", "rtx-3060"), ("RTX3090", "rtx-3090"),
        ("2080ti", "rtx-2080-ti"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("RTX 4060 Ti 8 GB", "rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "rtx-3080-laptop"), ("Tesla T4", "t4"), ("6000 Ada", "rtx-6000-ada"),
        ("rtx_5090", "rtx-5090"), ("A6000", "rtx-a6000"), ("nvidia v100", "v100"), ("GB10", "gb10"),
    ],
)  # fmt: skip
def test_names_as_people_write_them(name: str, key: str) -> None:
    assert find_spec(name) is device_specs()[key]


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("A100", "choose one of a100-80, a100-40, a100-pcie-80, a100-pcie-40"),
        ("A100 80GB", "choose one of a100-80, a100-pcie-80"),
        ("RTX 4060 Ti", "choose one of rtx-4060-ti-16gb, rtx-4060-ti-8gb"),
        ("RTX 6000", "choose one of quadro-rtx-6000, rtx-6000-ada, rtx-pro-6000"),
        ("rtx", "and 77 more (mbc gpus)"),
    ],
)
def test_a_name_of_several_gpus_asks_which(name: str, choices: str) -> None:
    with pytest.raises(MbcError, match=f"MBC070: several GPUs are called '{name}'") as caught:
        find_spec(name)
    assert choices in caught.value.remedy


def test_every_listed_name_is_understood() -> None:
    names = [row["name"] for row in CARDS.values()]
    for key, row in CARDS.items():
        assert find_spec(key) is device_specs()[key] is find_spec(key.upper().replace("-", " "))
        if names.count(row["name"]) == 1:
            assert find_spec(row["name"]) is device_specs()[key]
