"""Datasheets: figures with their sources, peaks that follow from them, and files of users."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.hardware.card_file import CardError, read_sheet, row_of, sheet_of
from mbc.hardware.datasheet import CARDS, FIGURE_SOURCES, MULTIPROCESSORS, OLDEST_CAPABILITY, capability_of
from mbc.hardware.spec import DeviceSpec, device_specs, find_spec, is_listed_card, known_spec, spec_of
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
    unlinked = _saved(path, "h200", nvlink_gb_s=0)
    assert (unlinked.fp16_tflops, unlinked.copy_gb_s) == (listed.fp16_tflops, listed.copy_gb_s), "measured all the same"
    assert unlinked.peer_link.to_peer_gb_s < listed.peer_link.to_peer_gb_s / 4
    assert replace(_saved(path, "h200", shared_kib=227), sheet=listed.sheet) == listed, "the architecture's"
    for change in ({"boost_mhz": 1900}, {"name": "Mine"}, {"fp32_accumulation": 0.5, "published": {}}):
        other = _saved(path, "h200", **change)
        assert other == spec_of(read_sheet(path)[0]) and other.copy_gb_s != listed.copy_gb_s
    changes = {key: 0.9 * CARDS["h200"][key] for key in ("memory_gb", "nvlink_gb_s", "bandwidth_gb_s", "tensor_mhz")}
    for key, value in {**changes, "pcie_lanes": 8, "boost_mhz": 1900, "l2_kib": 40960, "shared_kib": 100}.items():
        other = _saved(path, "h200", published={}, **{key: value})
        assert is_listed_card(other) == other.measured == (other.fp16_tflops == listed.fp16_tflops), "one rule"


PEAKS = {"fp32_tflops": 12.7, "tensor_tflops": 51}


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("", "it is not JSON (Expecting value", "no comma after the last entry"),
        (b"\xff\xfe", "it is not a text in UTF-8", "save it as plain text in UTF-8"),
        ("[" * 100_000, "it cannot be read as JSON", "a similar card: `mbc gpus rtx-3090 --json` writes"),
        ('{"ecc": true, "ecc": true}', "'ecc' is given 2 times", "keep the right one"),
        ("[1]", "it is not one JSON object", "a similar card: `mbc gpus rtx-3090 --json` writes"),
        ("{}", "it lacks name, architecture, multiprocessors, boost_mhz", "a similar card: `mbc gpus rtx-3090 --json`"),
        (
            json.dumps(CARD).replace("1777", "1" * 5000),
            f"'boost_mhz' is {'1' * 40}...; it has to be",
            "correct 'boost_mhz'",
        ),
        ({"l2_kib": 1.5}, "'l2_kib' is 1.5; it has to be a whole number from 64 to 16777216", "correct 'l2_kib'"),
        ({"multiprocessors": 0}, "'multiprocessors' is 0; it has to be a whole number from 1 to 512", "correct 'multi"),
        (
            {"multiprocessors": 2.5},
            "'multiprocessors' is 2.5; it has to be a whole number",
            "correct 'multiprocessors'",
        ),
        (
            {"multiprocessors": 3584},
            "is 3584; it has",
            "write 28 if the card has 3,584 CUDA cores: a multiprocessor of",
        ),
        ({"multiprocessors": 3585}, "is 3585; it has", "correct 'multiprocessors'"),
        (
            {"memory_gb": "12"},
            "'memory_gb' is \"12\"; it has to be a number from 0.5 to 2048 GiB",
            "correct 'memory_gb'",
        ),
        ({"memory_gb": 12884901888}, "'memory_gb' is 12884901888; it has to be a number", "correct 'memory_gb'"),
        ({"boost_mhz": float("nan")}, "'boost_mhz' is NaN; it has to be a number", "correct 'boost_mhz'"),
        (
            {"boost_mhz": 10**400},
            f"'boost_mhz' is 1{'0' * 39}...; it has to be a number from 100 to 10000 MHz",
            "correct",
        ),
        ({"boost_mhz": True}, "'boost_mhz' is true; it has to be a number", "in these units"),
        ({"tensor_mhz": -1}, "'tensor_mhz' is -1; it has to be a number", "correct 'tensor_mhz'"),
        ({"pcie_lanes": 7}, "'pcie_lanes' is 7; it has to be one of 1, 2, 4, 8, 16", "correct 'pcie_lanes'"),
        (
            {"architecture": "ampere"},
            "'architecture' is \"ampere\", none of the architectures sm_75",
            "write one of these",
        ),
        ({"architecture": "sm_999"}, "'architecture' is \"sm_999\", none of the architectures", "write one of these"),
        ({"architecture": "8.6"}, "'architecture' is \"8.6\", not an architecture such as sm_86", 'write "sm_86"'),
        ({"architecture": "Compute Capability 12.0"}, "not an architecture", 'write "sm_120"'),
        ({"architecture": "SM-90"}, "'architecture' is \"SM-90\"", 'write "sm_90"'),
        ({"architecture": 86}, "'architecture' is 86, not an architecture", 'write "sm_86"'),
        ({"architecture": None}, "'architecture' is null, none of", "write one of these"),
        ({"name": ""}, "'name' is not a short text", "at most 100 characters"),
        ({"name": "a@b"}, "'name' has an @", "the name of the whole card"),
        ({"ecc": 1}, "'ecc' is not true or false", 'write "ecc": true'),
        (
            {"cores": 3584},
            "'cores' is not a figure of a card; there are name, architecture, multi",
            "one of these names",
        ),
        ({"Boost-Clock": 1777}, "'Boost-Clock' is not a figure of a card", "did you mean 'boost_mhz'?"),
        ({"publish": {}}, "'publish' is not a figure of a card", "did you mean 'published'?"),
        ({"published": {"fp32_tflop": 1}}, "'fp32_tflop' in 'published' is not", "did you mean 'fp32_tflops'?"),
        ({"published": {"tensor_mhz": 1}}, "'tensor_mhz' in 'published' is not", "did you mean 'tensor_tflops'?"),
        ({"sources": {"boost": "tpu"}}, "'boost' in 'sources' is not a figure", "did you mean 'boost_mhz'?"),
        (
            {"memory_gb": 1200},
            "is 360 GB/s, but a card with 'memory_gb' 1200 GiB has at least 600 GB/s",
            "or 'memory_gb'",
        ),
        (
            {"bandwidth_gb_s": 1.8},
            "but a card with 'memory_gb' 12 GiB has at least 6.00 GB/s",
            "correct 'bandwidth_gb_s'",
        ),
        ({"multiprocessors": 1}, "with 'multiprocessors' 1 and 'boost_mhz' 1777 MHz has at most 114 GB/s", "correct"),
        ({"l2_kib": 3072 << 10}, "'l2_kib' is 3145728 KiB, but", "correct 'l2_kib' or 'memory_gb'"),
        ({"tensor_mhz": 1800}, "'tensor_mhz' is 1800 MHz, but", "correct 'tensor_mhz' or 'boost_mhz'"),
        (
            {"shared_kib": 100},
            "'shared_kib' is 100 KiB, but a card with 'architecture' sm_86 has at most 99.0",
            "correct",
        ),
        (
            {"nvlink_gb_s": 450},
            "but a card with 'bandwidth_gb_s' 360 GB/s has at most 360 GB/s",
            "correct 'nvlink_gb_s'",
        ),
        ({"published": "fp32_tflops"}, "'published' is not a JSON object", "leave 'published' out"),
        ({"published": {"tensor_tflops": None}}, "'tensor_tflops' is null; it has to be a number", "correct 'tensor_"),
        (
            {"published": {"fp32_tflops": "12"}},
            "'fp32_tflops' is \"12\"; it has to be a number",
            "correct 'fp32_tflops'",
        ),
        (
            {"published": PEAKS, "architecture": "sm_80"},
            "'published' has 12.7 TFLOP/s as 'fp32_tflops', but 28 multiprocessors of sm_80 with 64 CUDA cores each "
            "reach 6.37 TFLOP/s at 1777 MHz",
            "correct 'multiprocessors', 'architecture' (sm_86, sm_89, sm_120, sm_121 would fit) or the clock, or leave",
        ),
        (
            {"published": {"fp32_tflops": 1.09}, "multiprocessors": 384, "boost_mhz": 1425, "architecture": "sm_75"},
            "384 multiprocessors of sm_75 with 64 CUDA cores each reach 70.0 TFLOP/s",
            "write 'multiprocessors' 6: 384 are CUDA cores",
        ),
        (
            {"published": {"tensor_tflops": 102}},
            "102 TFLOP/s as 'tensor_tflops', but 28 multiprocessors of sm_86 with 'fp32_accumulation' 1 reach 51.0",
            "write the dense peak with fp32 accumulation",
        ),
        (
            {"published": {"tensor_tflops": 25.5}},
            "with 'fp32_accumulation' 1 reach",
            "write 'fp32_accumulation' 0.5, or",
        ),
        ({"published": {"tensor_tflops": 900}}, "900 TFLOP/s as 'tensor_tflops'", "correct 'multiprocessors', 'archi"),
    ],
)
def test_a_file_with_nonsense(tmp_path: Path, text: str | bytes | dict[str, Any], said: str, remedy: str) -> None:
    path = tmp_path / "card.json"
    path.write_bytes(text if isinstance(text, bytes) else _text(text).encode())
    with pytest.raises(MbcError, match=r"MBC069: the datasheet '.*card.json' cannot be used: ") as caught:
        read_sheet(path)
    assert said in caught.value.message and remedy in caught.value.remedy


def _text(card: str | dict[str, Any]) -> str:
    return card if isinstance(card, str) else json.dumps(CARD | card)


def test_each_listed_card_is_refused_with_its_cuda_cores_as_multiprocessors() -> None:
    """The remedy has the right number of multiprocessors."""
    for key in CURRENT:
        row = CARDS[key]
        cores = row["multiprocessors"] * MULTIPROCESSORS[capability_of(row["architecture"])].fp32_lanes
        with pytest.raises(CardError) as caught:
            sheet_of({**row, "multiprocessors": cores})
        assert caught.value.remedy.startswith(f"write {row['multiprocessors']} if the card has {cores:,} CUDA cores")


@pytest.mark.parametrize("factor", [0.5, 0.85, 1.15, 2])
def test_published_peaks_agree_with_the_figures(factor: float) -> None:
    for key in CURRENT:
        for peak, published in CARDS[key]["published"].items():
            with pytest.raises(CardError, match=f"TFLOP/s as '{peak}', but "):
                sheet_of({**CARDS[key], "published": {peak: factor * published}})


def test_a_whole_number_may_have_a_point(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(CARD | {"multiprocessors": 28.0, "l2_kib": 3072.0, "shared_kib": 64.0}), "utf-8-sig")
    assert read_sheet(path)[0] == sheet_of(CARD | {"shared_kib": 64})


def test_the_file_of_a_datasheet_has_its_figures() -> None:
    for key in CURRENT:
        sheet = sheet_of(CARDS[key])
        again = sheet_of(row_of(sheet))
        assert replace(again, memory_bytes=sheet.memory_bytes) == replace(sheet, tensor_mhz=again.tensor_mhz)
        assert again.memory_bytes == pytest.approx(sheet.memory_bytes, rel=1e-3)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MbcError, match=r"MBC069: .* cannot be used: No such file") as caught:
        find_device(str(tmp_path / "card.json"))
    assert caught.value.remedy.startswith("check the path")


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
