"""Ranks of one machine, started and watched; scripts replace trainings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.ranks import launch as module
from mbc.ranks.environment import RankEnvironment
from mbc.ranks.launch import check_gpus, command_line, mpiexec, starts
from tests.ranks.processes import LONG_S, ROOT, runs
from tests.ranks.test_mpi import AS_ROOT, with_mpi

GROUP = """
from mbc.errors import RankFailed
from mbc.ranks.environment import read_environment
from mbc.ranks.rank_group import Group
group = Group.open(read_environment(os.environ))
"""


def _start(script: str, count: int = 2, function: str = "launch") -> subprocess.Popen[str]:
    launcher = (
        f"import sys\nfrom mbc.ranks.launch import {function}\n"
        f"sys.exit({function}([sys.executable, '-c', {'import os, sys, time, signal' + chr(10) + script!r}], {count}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | AS_ROOT,
    )  # fmt: skip


def _run(script: str, count: int = 2) -> tuple[int, str, str]:
    process = _start(script, count)
    out, err = process.communicate(timeout=LONG_S)
    return process.returncode, out, err


def test_ranks_are_numbered_and_rank_0_is_shown():
    names = "'MBC_RANK', 'MBC_RANKS', 'MBC_LOCAL_RANK', 'MBC_LOCAL_RANKS'"
    script = f"print([os.environ[n] for n in ({names})], len(os.environ['MBC_JOB']))\nprint('note', file=sys.stderr)"
    assert _run(script, 3) == (0, "['0', '3', '0', '3'] 32\n", "note\n")


def test_ranks_meet():
    assert _run(f"{GROUP}\nprint(group.gather(b'%d' % group.rank))\ngroup.close()", 3)[:2] == (
        0, "(b'0', b'1', b'2')\n"
    )  # fmt: skip


def test_the_first_failure_is_reported_and_ends_all():
    script = "if os.environ['MBC_RANK'] == '1':\n    sys.exit('it went wrong')\ntime.sleep(600)"
    began_s = time.monotonic()
    assert _run(script, 3) == (1, "", "rank 1 failed (exit code 1):\nit went wrong\n")
    assert time.monotonic() - began_s < LONG_S


def test_a_rank_that_ends_for_another_is_not_the_first():
    # Rank 0 exits sooner, but with the code of a rank that ends for another one.
    script = "rank = os.environ['MBC_RANK']\ntime.sleep(1 if rank == '1' else 0)\nsys.exit(5 if rank == '1' else 3)"
    assert _run(script) == (5, "", "rank 1 failed (exit code 5) without a message\n")


def test_ranks_that_ignore_sigterm_are_killed():
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(2)\n"
    script += "if os.environ['MBC_RANK'] == '0':\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    assert _run(script)[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number):
    script = (
        "def end(number, frame):\n    print('got', number, flush=True)\n    sys.exit(40)\n"
        f"signal.signal({int(number)}, end)\nprint('ready', flush=True)\n"
        "time.sleep(600)"
    )
    process = _start(script, 1)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=LONG_S)[0] == f"got {int(number)}\n"
    assert process.returncode == 40


def test_no_rank_stays_behind_a_launcher_that_is_killed(tmp_path: Path):
    script = f"open(r'{tmp_path}/' + os.environ['MBC_RANK'], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    process = _start(script)
    deadline_s = time.monotonic() + LONG_S
    while len(texts := [path.read_text() for path in tmp_path.iterdir()]) < 2 or not all(texts):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.kill()
    process.wait()
    while any(runs(int(pid)) for pid in texts):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("function", ["launch", pytest.param("launch_with_mpi", marks=with_mpi)])
def test_a_killed_rank_ends_the_launcher(tmp_path: Path, function: str, killed: int):
    script = f"{GROUP}\nopen(r'{tmp_path}/%d' % group.rank, 'w').write(str(os.getpid()))\n"
    script += "try:\n    while True:\n        group.barrier()\n        time.sleep(0.01)\n"
    script += "except RankFailed as error:\n    print(error, file=sys.stderr)\n    sys.exit(3)"
    process = _start(script, 2, function)
    deadline_s = time.monotonic() + LONG_S
    while len(texts := {path.name: path.read_text() for path in tmp_path.iterdir()}) < 2 or not all(texts.values()):
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.02)
    os.kill(int(texts[str(killed)]), signal.SIGKILL)
    err = process.communicate(timeout=10)[1]
    assert not any(runs(int(pid)) for pid in texts.values())
    if function == "launch":  # mpiexec has words and codes of its own
        assert process.returncode == 128 + signal.SIGKILL
        assert f"rank {killed} failed (signal 9) without a message\n" in err
        assert killed == 0 or "rank 1 of 2 failed: it ended without a message" in err
    else:
        assert process.returncode != 0


def test_more_gpus_than_there_are():
    check_gpus(2, 2)
    with pytest.raises(MbcError, match=r"MBC266: --gpus 3 was asked for, but this machine has 2 GPUs"):
        check_gpus(3, 2)
    with pytest.raises(MbcError, match=r"MBC266: --gpus 2 was asked for, but this machine has 1 GPU"):
        check_gpus(2, 1)


def test_under_a_launcher_nothing_is_started():
    two = RankEnvironment(0, 2, 0, 2, "srun")
    assert [starts(2, None), starts(1, None), starts(None, None), starts(2, two), starts(None, two)] == [
        True, False, False, False, False,
    ]  # fmt: skip
    for gpus in (1, 4):
        with pytest.raises(MbcError, match=rf"MBC266: --gpus {gpus} was asked for, but srun started 2 ranks"):
            starts(gpus, two)


def test_no_mpiexec(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    with pytest.raises(
        MbcError, match="MBC265: ranks on CPUs are started by mpiexec, which is not installed"
    ) as caught:
        mpiexec()
    assert "pip install 'mbc-compiler[mpi]'" in caught.value.remedy


def test_a_folder_named_mbc_is_not_in_the_way(tmp_path: Path):
    (tmp_path / "mbc").mkdir()
    (tmp_path / "mbc" / "__init__.py").write_text("raise ImportError('another mbc')")
    done = subprocess.run(
        command_line(["--version"]), cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("mbc ")
