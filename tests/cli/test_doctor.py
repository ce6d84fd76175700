"""`mbc doctor` on the libraries that several ranks need."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from mbc.cli import doctor_command
from mbc.cli.doctor_command import Finding
from mbc.codegen.toolchain import Part, Toolchain
from mbc.hardware.collective_times import Link
from mbc.hardware.target import LocalGpu
from mbc.runtime import nccl_library

FAKE_NCCL = Path(__file__).parents[1] / "runtime" / "fake_nccl.c"


def _found(mbc) -> dict[str, Finding]:
    return {one["part"]: Finding(*one.values()) for one in mbc("doctor", "--json").json["findings"]}


@pytest.fixture(autouse=True)
def only_these_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let NCCL be looked for in this one folder only."""
    monkeypatch.setattr(nccl_library, "LIBRARY", "libnccl-of-a-test.so.2")
    monkeypatch.setattr(nccl_library, "loaded_folder", lambda _: None)
    monkeypatch.setattr(nccl_library, "library_folders", lambda: iter([tmp_path]))
    return tmp_path


def test_nothing_for_ranks_is_here(mbc, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("mbc.ranks.launch.shutil.which", lambda *_, **__: None)
    parts = _found(mbc)
    assert parts["NCCL"].remedy == "pip install 'mbc-compiler[nccl]'" and parts["NCCL"].version is None
    assert parts["NCCL"].cost == "a training stays on one GPU"
    assert "mbc-compiler[mpi]" in parts["mpi4py"].remedy
    assert parts["launcher"].cost.endswith("--gpus on this machine's GPUs needs none")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize(
    ("version", "said"),
    [(22803, "2.28.3 ({library})"), (22605, "a training stays on one GPU: NCCL 2.26.5 is too old for CUDA 13")],
)
def test_nccl(mbc, tmp_path: Path, version: int, said: str):
    library = tmp_path / nccl_library.LIBRARY
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(FAKE_NCCL)], check=True)
    ctypes.CDLL(str(library)).fake_reset(version, 0, 0, 0)
    finding = _found(mbc)["NCCL"]
    assert (finding.version or finding.cost).startswith(said.format(library=library))


def test_nccl_that_does_not_load(mbc, tmp_path: Path):
    (tmp_path / nccl_library.LIBRARY).write_text("no library")
    finding = _found(mbc)["NCCL"]
    assert finding.version is None and "which does not load: " in finding.cost


def test_launchers(mbc, monkeypatch, tmp_path: Path):
    for name in ("mpiexec", "srun"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("mbc.ranks.launch.sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _found(mbc)["launcher"].version == f"mpiexec ({tmp_path / 'mpiexec'}), srun"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ((), "everything is here to compile for and train on this machine's GPU\n"),
        (("NCCL",), "this machine's GPU; without NCCL several processes cannot share a training\n"),
        (("CUPTI",), "this machine's GPU; without CUPTI no step is recorded\n"),
        (
            ("CUPTI", "NCCL"),
            "; without NCCL several processes cannot share a training; without CUPTI no step is recorded\n",
        ),
        (("NCCL", "GPU"), "\nwithout NCCL, GPU: planning and training on the CPU work all the same\n"),
    ],
)
def test_the_last_line(mbc, monkeypatch, missing, said):
    findings = [Finding("mbc", "1"), *(Finding(part, None, "cost", "remedy") for part in missing)]
    monkeypatch.setattr(doctor_command, "examine", lambda: iter(findings))
    assert mbc("doctor").out.endswith(said)


def test_links_between_gpus(mbc, monkeypatch):
    gpus = tuple(LocalGpu("NVIDIA H200", "580.1", "sm_90", 10**9, 10**9, uuid) for uuid in "ab")
    monkeypatch.setattr("mbc.hardware.target.local_gpus", lambda: gpus)
    asked: list[list[str]] = []
    monkeypatch.setattr("mbc.hardware.topology.link_between", lambda uuids: asked.append(uuids) or Link.NVLINK)
    assert _found(mbc)["link"].version == "NVLink between the GPUs (the slowest of any two)" and asked == [["a", "b"]]
    monkeypatch.setattr("mbc.hardware.target.local_gpus", lambda: gpus[:1])
    assert "link" not in _found(mbc)


@pytest.mark.parametrize(
    ("gpu", "driver", "old"),
    [
        (("NVIDIA H200", "sm_90"), "580.1", []),
        (("NVIDIA H200", "sm_90"), "535.2", ["driver"]),
        (("Tesla V100-SXM2-16GB", "sm_70"), "580.1", ["GPU 0"]),
        (("NVIDIA GeForce GTX 1080", "sm_61"), "535.2", ["driver", "GPU 0"]),
        (("NVIDIA GeForce RTX 5090", "sm_120"), "580.1", []),
        (("NVIDIA L4", "sm_89"), "580.1", ["GPU 0"]),
        (("NVIDIA GeForce RTX 6090", "sm_130"), "620.1", ["GPU 0"]),
    ],
)
def test_an_unusable_driver_or_gpu(mbc, monkeypatch, gpu, driver, old):
    """The nvcc of this test does not compile for 8.9."""
    name, architecture = gpu
    monkeypatch.setattr("mbc.codegen.toolchain._architectures", lambda _: ("sm_75", "sm_90", "sm_120"))
    monkeypatch.setattr("mbc.hardware.target.local_gpus", lambda: (LocalGpu(name, driver, architecture, 2**34, 2**34),))
    parts = _found(mbc)
    assert [part for part in ("driver", "GPU 0") if parts[part].cost] == old
    assert "16.0 GiB of 16.0 GiB free" in str(parts["GPU 0"].version)
    lines = mbc("doctor").out.splitlines()
    assert [line.split("  ")[0].removeprefix("unusable ") for line in lines if line.startswith("unusable")] == old


@pytest.mark.parametrize(
    ("release", "cudnn", "old"), [("13.0", "9.19.0", []), ("12.3", "9.20.1", ["nvcc"]), ("12.4", "9.8.0", ["cuDNN"])]
)
def test_an_old_toolkit_or_cudnn(mbc, monkeypatch, tmp_path: Path, release, cudnn, old):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    numbers = zip(("MAJOR", "MINOR", "PATCHLEVEL"), cudnn.split("."), strict=True)
    (tmp_path / "cudnn_version.h").write_text("".join(f"#define CUDNN_{name} {value}\n" for name, value in numbers))
    part = Part(tmp_path, tmp_path, "libcudnn.so.9")
    tools = Toolchain(nvcc, None, None, part, None, ("sm_75", "sm_90"), (), None)
    monkeypatch.setattr("mbc.codegen.toolchain.find_toolchain", lambda: tools)
    parts = _found(mbc)
    assert [name for name in ("nvcc", "cuDNN") if parts[name].cost] == old
    for name in old:
        assert parts[name].cost.startswith(f"older than {'12.4' if name == 'nvcc' else '9.19'}") and parts[name].remedy


def test_gpus_that_mbc_cannot_plan_for_as_a_whole(mbc, monkeypatch):
    gpus = tuple(LocalGpu(f"NVIDIA {name}", "580.1", "sm_90", 10**9, 10**9, name) for name in ("H100", "H200"))
    monkeypatch.setattr("mbc.hardware.target.local_gpus", lambda: gpus)
    monkeypatch.setattr("mbc.hardware.target.mig_slice", lambda: "NVIDIA H100 MIG 1g.10gb")
    apps = [["H200", "7", "1024"]]
    monkeypatch.setattr("mbc.hardware.target.ask_nvidia_smi", lambda _: apps)
    parts = _found(mbc)
    assert parts["GPU 0"].cost.startswith("CUDA sees only a slice that MIG divides off (NVIDIA H100 MIG 1g.10gb)")
    assert not parts["GPU 1"].cost and "shared with process 7 (1.00 GiB)" in str(parts["GPU 1"].version)
    assert str(parts["unlike GPUs"].version).startswith("plans are for NVIDIA H100; ")
