"""Sums over ranks through MPI: mpiexec starts two ranks, if mpi4py and an MPI are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mbc.errors import MbcError
from mbc.ranks import mpi
from mbc.ranks.environment import RankEnvironment
from mbc.ranks.launch import _OPEN_MPI
from tests.ranks.processes import LONG_S, ROOT

TWO = RankEnvironment(1, 2, 1, 2, "mpiexec")
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
with_mpi = [
    pytest.mark.skipif(
        MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="mpi4py or mpiexec is not installed"
    ),
    pytest.mark.xdist_group("mpi"),
]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # what containers need

SUMS = """
import os, sys
import numpy as np
from mbc.ranks import mpi
from mbc.ranks.environment import read_environment
from mbc.ranks.rank_group import Group
mpi._CHUNK_BYTES = 4000
environment = read_environment(os.environ)
with Group.open(environment) as group:
    assert group.size == environment.size
    total = mpi.MpiCollectives(environment, group.check)
    for dtype in (np.float32, np.float16, np.float64, np.int64):
        parts = [np.random.default_rng(rank).normal(size=(7, 331)) * 100 for rank in range(group.size)]
        parts = [part.astype(dtype) for part in parts]
        expected = parts[0].copy()
        for part in parts[1:]:
            expected += part
        mine = parts[group.rank]
        total.add(mine)
        assert mine.tobytes() == expected.tobytes()
    mine = np.full((3, 2), group.rank, np.float32)
    assert (total.gather(mine) == np.arange(group.size)[:, None, None]).all()
    scalar = np.array(float(group.rank + 1), np.float32)
    total.add(scalar)
    total.add(np.empty(0, np.float32))
    if group.rank == 0:
        print(float(scalar))
assert sys.modules["mpi4py.MPI"].Is_finalized()
"""


def _mpiexec(count: int, *command: str) -> subprocess.CompletedProcess[str]:
    assert MPIEXEC is not None
    return subprocess.run(
        [MPIEXEC, "-n", str(count), *command], capture_output=True, text=True, timeout=LONG_S, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | AS_ROOT | _OPEN_MPI,
    )  # fmt: skip


class TestWithMpi:
    pytestmark = with_mpi

    @pytest.mark.parametrize("count", [2, 3])
    def test_sums_are_the_same_on_all_ranks_to_the_bit(self, count: int) -> None:
        done = _mpiexec(count, sys.executable, "-c", SUMS)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) == count * (count + 1) / 2

    def test_ranks_find_each_other_behind_a_shell(self) -> None:
        done = _mpiexec(2, "sh", "-c", f'"{sys.executable}" -c "$0"; exit $?', SUMS)
        assert done.returncode == 0, done.stderr

    def test_several_machines_meet_by_a_broadcast(self) -> None:
        # Each rank believes that it is alone on its machine.
        alone = "{'MPI_LOCALRANKID': '0', 'MPI_LOCALNRANKS': '1'}"
        alone += " | {'OMPI_COMM_WORLD_LOCAL_RANK': '0', 'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}"
        script = SUMS.replace("(os.environ)\n", f"(os.environ | {alone})\nassert not environment.one_machine\n")
        assert script != SUMS
        done = _mpiexec(2, sys.executable, "-c", script)
        assert done.returncode == 0, done.stderr

    def test_a_launcher_of_another_mpi_is_refused(self) -> None:
        script = (
            "from mbc.ranks.environment import RankEnvironment\nfrom mbc.ranks.mpi import open_world\n"
            "open_world(RankEnvironment(1, 2, 1, 2, 'mpiexec'))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert "MBC265: mpiexec started rank 1 of 2, but in mpi4py's world (" in done.stderr
        assert ") it is rank 0 of 1\n" in done.stderr


def _world(size: int, rank: int) -> SimpleNamespace:
    return SimpleNamespace(
        COMM_WORLD=SimpleNamespace(size=size, rank=rank), Get_library_version=lambda: "Open MPI v5\nmore"
    )


def test_two_worlds_of_one_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", _world(1, 0))
    with pytest.raises(MbcError, match=r"MBC265: mpiexec started rank 1 of 2, but in mpi4py's world \(Open MPI v5\)"):
        mpi.open_world(TWO)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", _world(2, 1))
    assert mpi.open_world(TWO)[1].size == 2


def test_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MbcError, match="MBC265: ranks on CPUs need MPI, which cannot be loaded: ") as caught:
        mpi.open_world(TWO)
    assert "pip install 'mbc-compiler[mpi]'" in caught.value.remedy


def test_a_wait_gives_up_where_a_rank_has_failed():
    def failed() -> None:
        raise MbcError("MBC264", "rank 1 of 2 failed: for the test")

    with pytest.raises(MbcError, match="MBC264"):
        mpi.wait(SimpleNamespace(Test=lambda: False), failed)
    polls = iter([False] * 60 + [True])
    mpi.wait(SimpleNamespace(Test=lambda: next(polls)), lambda: None)
    assert next(polls, None) is None
