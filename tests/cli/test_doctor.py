"""`mbc doctor` on what several ranks need."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mbc.cli import doctor_command
from mbc.cli.doctor_command import Finding
from mbc.hardware.collectives import Link
from mbc.hardware.target import LocalGpu


def _found(mbc) -> dict[str, Finding]:
    return {finding["part"]: Finding(**finding) for finding in mbc("doctor", "--json").json["findings"]}


def test_nothing_for_ranks_is_here(mbc, monkeypatch):
    monkeypatch.setattr("mbc.runtime.library.library_folders", lambda: iter(()))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("mbc.ranks.launch.shutil.which", lambda *_, **__: None)
    found = _found(mbc)
    assert found["NCCL"].remedy == "pip install 'mbc-compiler[nccl]'" and found["NCCL"].found is None
    assert "mbc-compiler[mpi]" in found["mpi4py"].remedy
    assert found["launcher"].cost.endswith("--gpus on this machine's GPUs needs none")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_nccl_and_launchers(mbc, monkeypatch, tmp_path: Path):
    library = tmp_path / "libnccl.so.2"
    source = "int ncclGetVersion(int* version) { *version = 22803; return 0; }"
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True)
    monkeypatch.setattr("mbc.runtime.library.library_folders", lambda: iter([tmp_path]))
    for name in ("mpiexec", "srun"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("mbc.ranks.launch.sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = _found(mbc)
    assert found["NCCL"].found == f"2.28.3 ({library})"
    assert found["launcher"].found == f"mpiexec ({tmp_path / 'mpiexec'}), srun"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "libnccl.so.2").write_text("no library")
    monkeypatch.setattr("mbc.runtime.library.library_folders", lambda: iter([broken]))
    assert "that does not load: " in (_found(mbc)["NCCL"].found or "")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ((), "everything is here to compile for and train on this machine's GPU\n"),
        (("NCCL",), "this machine's GPU; without NCCL several processes cannot share a training\n"),
        (("NCCL", "GPU"), "\nwithout NCCL, GPU: planning and training on the CPU work all the same\n"),
    ],
)
def test_the_last_line(mbc, monkeypatch, missing, said):
    findings = [Finding("mbc", "1"), *(Finding(part, None, "cost", "remedy") for part in missing)]
    monkeypatch.setattr(doctor_command, "examine", lambda: iter(findings))
    assert mbc("doctor").out.endswith(said)


def test_what_joins_the_gpus(mbc, monkeypatch):
    gpus = tuple(LocalGpu("NVIDIA H200", "580.1", "sm_90", 10**9, 10**9, uuid) for uuid in "ab")
    monkeypatch.setattr("mbc.hardware.target.local_gpus", lambda: gpus)
    asked: list[list[str]] = []
    monkeypatch.setattr("mbc.hardware.topology.link_between", lambda uuids: asked.append(uuids) or Link.NVLINK)
    assert _found(mbc)["link"].found == "NVLink between the GPUs (the slowest of any two)" and asked == [["a", "b"]]
    monkeypatch.setattr("mbc.hardware.target.local_gpus", lambda: gpus[:1])
    assert "link" not in _found(mbc)
