"""Parts of GPUs: their names, their properties, and the sizes that exist."""

from __future__ import annotations

import pytest

from mbc.errors import MbcError
from mbc.hardware.part import split_name, whole_name
from mbc.hardware.spec import find_spec, known_spec, spec_like
from mbc.hardware.target import find_device
from mbc.profile.paths import user_path

H100 = find_spec("h100")


def test_a_part_has_a_share_of_the_compute_units_and_all_memory():
    part = find_device("h100@72")
    assert part.multiprocessors == 72 and part.memory_bytes == H100.memory_bytes and part.l2_bytes == H100.l2_bytes
    assert part.bf16_tflops == pytest.approx(H100.bf16_tflops * 72 / 132)
    assert H100.copy_gb_s * 72 / 132 < part.copy_gb_s < H100.copy_gb_s
    assert not part.measured


def test_its_name_says_it_everywhere():
    part = find_device("h100@72")
    assert part.name == f"{H100.name}@72" and split_name(part.name) == (H100.name, 72, "")
    assert whole_name(part.name) == whole_name(H100.name) == H100.name and split_name(H100.name) == (
        H100.name,
        None,
        "",
    )
    assert part == spec_like(part.name, "sm_90") == known_spec(part.name)
    assert user_path(part.name) != user_path(H100.name)
    assert known_spec("NVIDIA Z1@8") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100@", "'h100@' is not a part of a GPU"),
        ("h100@half", "'h100@half' is not a part of a GPU"),
        ("@8", "'@8' is not a part of a GPU"),
        ("h200@sm86", r"help: did you mean h200@sm_86\? Else write a number of multiprocessors"),
        ("h200@72@SM-12.0", r"help: did you mean h200@72@sm_120\? Else"),
        ("auto@8.6", r"help: did you mean auto@sm_86\? Else"),
        ("h200@sm99", "help: write a number"),
        ("h100@0", "a multiple of 8, at least 8 and fewer than 132\nhelp: choose 8 or 16"),
        ("h100@70", "help: choose 64 or 72"),
        ("h100@132", "help: choose 128$"),
        ("h100@999", "help: choose 128$"),
        ("a100-80@3", "a multiple of 2, at least 4 and fewer than 108\nhelp: choose 4 or 6"),
        ("b200@12", "help: choose 8 or 16"),
    ],
)
def test_parts_that_cannot_be(name: str, message: str):
    with pytest.raises(MbcError, match="MBC286") as caught:
        find_device(name)
    assert caught.match(message)


@pytest.mark.parametrize("name", ["h100@8", "h100@128", "a100-80@4", "a100-80@106"])
def test_the_smallest_and_the_largest_part(name: str):
    assert find_device(name).multiprocessors == int(name.rpartition("@")[2])


def test_facts_of_an_unknown_gpu():
    with pytest.raises(MbcError, match="MBC070: unknown GPU 'z1'"):
        find_device("z1@8")
