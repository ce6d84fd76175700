"""GPUs of this machine as the driver describes them, by a driver's library and an nvidia-smi of tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mbc.cli import main
from mbc.errors import MbcError
from mbc.hardware import driver_card, target
from mbc.hardware.spec import find_spec, known_spec, unlisted_sheet
from mbc.hardware.target import current_gpu, find_device, local_gpus, local_spec
from mbc.measure.fleet import sharing_notes

Machine = Callable[..., None]
GB = 1 << 30
# Multiprocessors, clocks in kHz, bus, L2, shared memory, capability, whether integrated, memory.
RTX_3060 = (28, 1_837_000, 7_501_000, 192, 2_359_296, 101_376, 8, 6, 0, 12_487_000_000)
H100 = (132, 1_980_000, 2_619_000, 5120, 52_428_800, 232_448, 9, 0, 0, 85_029_158_912)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that lets this machine have GPUs: attributes, name, and what nvidia-smi says otherwise."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")

    def become(*gpus: tuple[tuple[int, ...], str], memory: str = "", link: str = "4, 16", apps: str = "") -> None:
        lines, rows = [], []
        for index, (figures, name) in enumerate(gpus):
            lines.append(f'{{{{{", ".join(map(str, figures))}}}, {index + 1}, "{name}"}},')
            identity = f"GPU-{index + 1:02x}000000-0000-0000-0000-000000000000"
            free = memory or f"{figures[-1] >> 20}, {(figures[-1] >> 20) - 200}"
            rows.append(f"{name}, 580.1, {figures[6]}.{figures[7]}, {free}, {identity}, 0:{index}, {link}")
        smi = tmp_path / "nvidia-smi"
        text = "\n".join(rows)
        smi.write_text(
            f"#!/bin/sh\ncase $1 in --query-gpu=name*) echo '{text}' ;; --query-compute*) echo '{apps}' ;; esac\n"
        )
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        (tmp_path / "gpus.h").write_text("\n".join(lines))
        library = tempfile.mkdtemp(dir=tmp_path) + "/libcuda.so.1"
        options = ["-shared", "-fPIC", f"-I{tmp_path}", "-o", library]
        subprocess.run(["gcc", *options, str(Path(__file__).with_name("fake_cuda.c"))], check=True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(driver_card, "LIBRARY", library)
        driver_card._asked.cache_clear()

    return become


def test_a_card_that_no_list_names_is_planned_as_what_it_is(machine: Machine) -> None:
    machine((RTX_3060, "NVIDIA GeForce RTX 3061"), link="4, 8")
    device = find_device("auto")
    assert (device.name, device.architecture, device.multiprocessors) == ("NVIDIA GeForce RTX 3061", "sm_86", 28)
    assert device.memory_bytes == 12_487_000_000 and device.l2_bytes == 2_359_296
    assert device.copy_gb_s == pytest.approx(0.9 * 360, rel=0.01)
    assert device.fp32_tflops == pytest.approx(28 * 128 * 2 * 1.837e-3)
    assert device.fp16_tflops == pytest.approx(2 * device.fp32_tflops), "half rate with fp32 accumulation"
    assert device.shared_bytes_of_block == 99 << 10
    assert device.host_link.to_device_gb_s == pytest.approx(find_spec("rtx-3060").host_link.to_device_gb_s / 2)
    assert unlisted_sheet(device) == device.sheet and known_spec(device.name) is None
    assert known_spec(device.name, device.sheet) == device == local_spec(device.name, "sm_86")
    assert find_device("auto@14").multiprocessors == 14


def test_the_listed_datasheet_of_a_name_holds(machine: Machine) -> None:
    machine((H100, "NVIDIA H100 80GB HBM3"), link="5, 16")
    assert find_device("auto") == find_spec("h100") and unlisted_sheet(find_device("auto")) is None
    machine((RTX_3060, "NVIDIA GeForce RTX 3060"))
    device = find_device("auto")
    assert device.sheet == find_spec("rtx-3060").sheet and device.memory_bytes < find_spec("rtx-3060").memory_bytes


def test_a_card_that_contradicts_its_datasheet(machine: Machine) -> None:
    machine(((30, *RTX_3060[1:]), "NVIDIA GeForce RTX 3060"))
    device = find_device("auto")
    assert device.multiprocessors == 30 and device.sheet is not None and device.sheet.boost_mhz == 1777
    assert unlisted_sheet(device) is not None
    machine(((*RTX_3060[:-1], 8_361_000_000), "NVIDIA GeForce RTX 3060"))
    assert find_device("auto").sheet == find_spec("rtx-3060-8gb").sheet, "of two cards of one name, that memory"
    machine((H100, "NVIDIA H100 80GB HBM3"), link="4, 8")
    slow = find_device("auto")
    assert slow.host_link.to_device_gb_s < find_spec("h100").host_link.to_device_gb_s / 3
    assert slow.copy_gb_s == find_spec("h100").copy_gb_s and unlisted_sheet(slow) is not None


def test_a_gpu_that_shares_the_memory_of_the_host(machine: Machine) -> None:
    """nvidia-smi has no memory of such a GPU, the driver no clock of it, and the name is that of a family."""
    machine(((16, 1_300_000, 0, 256, 4 << 20, 167_936, 8, 7, 1, 64_349_724_672), "Orin"), memory="[N/A], [N/A]")
    device = find_device("auto")
    assert (device.name, device.multiprocessors, device.memory_bytes) == ("Orin", 16, 64_349_724_672)
    assert device.copy_gb_s == find_spec("jetson-agx-orin-64").copy_gb_s


def test_cuda_chooses_among_unlike_cards(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine((RTX_3060, "NVIDIA GeForce RTX 3060"), (H100, "NVIDIA H100 80GB HBM3"))
    cards = driver_card.driver_cards()
    monkeypatch.setattr(target, "driver_cards", lambda: cards[::-1])
    assert [gpu.name for gpu in local_gpus()] == ["NVIDIA GeForce RTX 3060", "NVIDIA H100 80GB HBM3"]
    first = current_gpu()
    assert first is not None and first.name == "NVIDIA H100 80GB HBM3"
    assert main(["gpus"]) == 0
    said = capsys.readouterr().out
    assert "28 multiprocessors up to 1837 MHz, 360 GB/s, 2.25 MiB of L2 cache, 99.0 KiB" in said
    assert "--gpu auto plans for the first GPU that CUDA sees, NVIDIA H100 80GB HBM3" in said


def test_figures_of_the_gpu_of_this_machine(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mbc gpus auto` shows the listed figures, or the driver's, and writes them as a file for --gpu."""
    machine((H100, "NVIDIA H100 80GB HBM3"), link="5, 16")
    assert main(["gpus", "auto@72"]) == 0
    assert capsys.readouterr().out.startswith("NVIDIA H100 80GB HBM3@72 (h100@72), sm_90\n")
    machine((RTX_3060, "NVIDIA GeForce RTX 3061"), link="4, 8")
    assert main(["gpus", "auto"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("NVIDIA GeForce RTX 3061 (auto), sm_86\n") and "\nboost_mhz              1837 MHz\n" in said
    assert main(["gpus", "auto", "--json"]) == 0
    path = tmp_path / "card.json"
    path.write_text(capsys.readouterr().out)
    device, here = find_device(str(path)), find_device("auto")
    assert device.memory_bytes == pytest.approx(here.memory_bytes, rel=1e-3)
    assert device.host_link == here.host_link and device.fp16_tflops == here.fp16_tflops


def test_a_slice_of_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(((16, *H100[1:-1], 10 * GB), "NVIDIA H100 80GB HBM3 MIG 1g.10gb"))
    with pytest.raises(MbcError, match=r"MBC085: MIG divides the GPU of this machine, .* MIG 1g.10gb"):
        find_device("auto")
    monkeypatch.setattr(target, "driver_cards", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0a1b")
    with pytest.raises(MbcError, match=r"MBC085: MIG divides .* only a slice \(MIG-0a1b\)"):
        find_device("auto@8")


def test_architectures_without_data(machine: Machine) -> None:
    machine(((20, *RTX_3060[1:6], 6, 1, 0, 8 * GB), "NVIDIA GeForce GTX 1080"))
    with pytest.raises(MbcError, match=r"MBC071: .* has compute capability 6.1, and CUDA 13 needs 7.5 or more"):
        find_device("auto")
    machine(((200, *RTX_3060[1:6], 13, 0, 0, 64 * GB), "NVIDIA GeForce RTX 6090"))
    with pytest.raises(MbcError, match=r"MBC071: .* an architecture on which mbc has no data \(sm_130\)") as caught:
        find_device("auto")
    assert "newer GPUs run most of its packages" in caught.value.remedy


def test_a_card_that_others_use(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    used = "GPU-01000000-0000-0000-0000-000000000000, 7, 2048"
    machine((RTX_3060, "NVIDIA GeForce RTX 3060"), apps=f"{used}\nGPU-ff, 8, 1\n{used.replace(' 7', ' 9')}")
    assert main(["gpus"]) == 0
    said = "shared with processes 7, 9 (4.00 GiB): measured times are then too long"
    assert said in capsys.readouterr().out
    assert sharing_notes(("0",)) == (f"GPU 0 is {said}",) and sharing_notes(()) == sharing_notes(("5",)) == ()


def test_a_card_that_no_list_names_can_pose(machine: Machine) -> None:
    machine((RTX_3060, "NVIDIA GeForce RTX 3061"))
    pose = find_device("auto@sm_75")
    assert pose.name == "NVIDIA GeForce RTX 3061@sm_75" and pose.multiprocessors == 28
    assert pose.shared_bytes_of_block == 64 << 10 and not pose.has_bf16_and_tf32 and pose.code_architecture == "sm_75"
    sheet = unlisted_sheet(pose)
    assert sheet is not None and known_spec(pose.name, sheet) == local_spec(pose.name, "sm_75") == pose
    with pytest.raises(MbcError, match=r"MBC288: .* cannot pose as sm_90, which has instructions that it lacks"):
        find_device("auto@sm_90")


def test_a_machine_without_a_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((RTX_3060, "NVIDIA GeForce RTX 3061"))
    monkeypatch.setattr(driver_card, "LIBRARY", "libcuda-of-a-test.so.1")
    assert driver_card.driver_cards() == ()
    (gpu,) = local_gpus()
    assert gpu.card is None and find_device("auto").name == "NVIDIA GeForce RTX 3061"
    assert find_device("auto").memory_bytes == gpu.memory_bytes
