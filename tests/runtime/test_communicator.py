"""NCCL through ctypes, with a libnccl.so that records its calls: structs, versions, errors and aborts."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.runtime import nccl_library
from mbc.runtime.communicator import Communicator, SymmetricMemory, connect
from mbc.runtime.nccl_library import DataType, Nccl, Reduction, load_nccl, open_nccl, version_text

VERSION, FOREVER = 22703, 1 << 30
REMOTE_ERROR, IN_PROGRESS = 6, 7
Reset = Callable[[int, int, int, int], None]  # version, polls in progress, asynchronous error, status of calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to build a library to load")
    folder = tmp_path_factory.mktemp("nccl")
    source = Path(__file__).with_name("fake_nccl.c")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(folder / "libnccl.so.2")], check=True)
    return folder


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setattr(nccl_library, "loaded_folder", lambda prefix: None)
    monkeypatch.setattr(nccl_library, "library_folders", lambda: (folder,))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    load_nccl.cache_clear()
    library = ctypes.CDLL(str(folder / "libnccl.so.2"))
    library.fake_log.restype = ctypes.c_char_p
    library.fake_reset(VERSION, 0, 0, 0)
    return library


def log(fake: ctypes.CDLL) -> list[str]:
    return fake.fake_log().decode().split(";")[:-1]


def joined(timeout_s: float = 5.0) -> Communicator:
    nccl = load_nccl()
    return Communicator(nccl, nccl.unique_id(), 1, 2, 8, timeout_s)


def test_the_configuration_and_the_unique_id_arrive_as_nccl_has_them(fake: ctypes.CDLL):
    assert load_nccl().version == VERSION and version_text(VERSION) == "2.27.3"
    communicator = joined()
    assert log(fake) == ["init 1 of 2 blocking=0 ctas=1..8 split=0"]
    nccl = load_nccl()
    Communicator(nccl, nccl.unique_id(), 0, 2)
    undefined = -(1 << 31)
    assert log(fake)[1] == f"init 0 of 2 blocking=0 ctas={undefined}..{undefined} split=0"
    assert communicator.handle
    for name in ("ncclAllReduce", "ncclCommGetAsyncError"):
        assert nccl.address(name) == ctypes.cast(getattr(fake, name), ctypes.c_void_p).value
    assert nccl.address("ncclOfALaterVersion") == 0


def test_collectives_work_in_place(fake: ctypes.CDLL):
    communicator = joined()
    communicator.all_reduce(0x7F0000000000, 5_000_000_000, 0xABC0)
    communicator.all_reduce(0x100, 1, 0, DataType.BF16, Reduction.MAX)
    communicator.reduce_scatter(0x1000, 16, 0)
    communicator.all_gather(0x1000, 16, 0, DataType.FP16)
    assert log(fake)[1:] == [
        "all_reduce 7f0000000000 7f0000000000 5000000000 7 0 1 abc0",
        "all_reduce 100 100 1 9 2 1 0",
        "reduce_scatter 1000 1040 16 7 0",
        "all_gather 1020 1000 16 6",
    ]


def test_parts_that_differ_are_broadcast_each_by_its_rank(fake: ctypes.CDLL):
    communicator = joined()
    communicator.gather_parts(0x1000, 32, 64, 0)
    communicator.gather_parts(0x1000, 32, 48, 0)
    communicator.gather_parts(0x1000, 32, 32, 0)  # nothing is left for the second rank
    assert log(fake)[1:] == [
        "all_gather 1020 1000 32 1",
        "group", "broadcast 1000 1000 32 1 0", "broadcast 1020 1020 16 1 1", "end",
        "group", "broadcast 1000 1000 32 1 0", "end",
    ]  # fmt: skip


def test_connecting_runs_every_size_once(fake: ctypes.CDLL):
    connect(joined(), 0x1000, (4, 1024), 0)
    assert [line.split()[3] for line in log(fake)[1:]] == ["1", "256"]


def test_calls_in_progress_are_polled(fake: ctypes.CDLL):
    fake.fake_reset(VERSION, 3, 0, IN_PROGRESS)
    communicator = joined()
    assert communicator.check()
    fake.fake_reset(VERSION, 2, 0, IN_PROGRESS)
    communicator.all_reduce(0, 1, 0)
    assert communicator.check() and log(fake) == ["all_reduce 0 0 1 7 0 1 0"]
    asked: list[int] = []

    def done() -> bool:
        asked.append(1)
        return len(asked) == 3

    communicator.wait(done)
    assert len(asked) == 3


def test_ranks_that_do_not_come_are_given_up(fake: ctypes.CDLL):
    fake.fake_reset(VERSION, FOREVER, 0, IN_PROGRESS)
    with pytest.raises(MbcError) as caught:
        joined(timeout_s=0.02)
    assert caught.value.code == "MBC273"
    assert caught.value.message == "rank 1 of 2 has waited 0.02 s for the other ranks"
    assert log(fake)[1:] == ["abort"]


def test_an_asynchronous_error_aborts(fake: ctypes.CDLL):
    communicator = joined()
    fake.fake_reset(VERSION, 0, REMOTE_ERROR, 0)
    with pytest.raises(MbcError) as caught:
        communicator.wait(lambda: False)
    assert caught.value.code == "MBC272"
    assert caught.value.message == "NCCL failed in a collective (error 6): remote process exited: rank 1 is gone"
    assert log(fake) == ["abort"] and communicator.handle == 0
    communicator.abort()
    communicator.close()  # nothing is left to close
    assert log(fake) == ["abort"]


def test_after_an_abort_in_another_thread_nothing_is_asked(fake: ctypes.CDLL):
    communicator = joined()
    thread = threading.Thread(target=communicator.abort)
    thread.start()
    thread.join()
    with pytest.raises(MbcError, match="the communicator was aborted") as caught:
        communicator.wait(lambda: False)
    assert caught.value.code == "MBC272" and log(fake)[1:] == ["abort"]


def test_a_refused_call_says_which(fake: ctypes.CDLL):
    communicator = joined()
    fake.fake_reset(VERSION, 0, 0, REMOTE_ERROR)
    with pytest.raises(MbcError, match="MBC272: NCCL failed in ncclAllReduce"):
        communicator.all_reduce(0, 1, 0)
    nccl = load_nccl()
    with pytest.raises(MbcError, match="MBC272: NCCL failed in ncclCommInitRankConfig"):
        Communicator(nccl, bytes(128), 0, 2)


def test_closing_finalizes_first(fake: ctypes.CDLL):
    communicator = joined()
    communicator.close()
    communicator.close()
    assert log(fake)[1:] == ["finalize", "destroy"] and communicator.handle == 0


def test_memory_for_registration(fake: ctypes.CDLL):
    nccl = load_nccl()
    address = nccl.allocate(1 << 33)
    nccl.free(address)
    assert log(fake) == [f"allocate {1 << 33}", f"free {address:x}"]


def test_copies_work_in_memory_that_is_registered(fake: ctypes.CDLL):
    fake.fake_reset(22800, 0, 0, 0)
    communicator = joined()
    fake.fake_polls(3)
    assert communicator.register(0x7F0000000000, 5_000_000_000)
    communicator.all_to_all(0x7F0000000000, 0x7F0000001000, 64, 0)
    communicator.close()
    assert log(fake)[1:] == [
        "register 7f0000000000 5000000000 1", "all_to_all 7f0000000000 7f0000001000 64 7", "deregister 2000",
        "finalize", "destroy",
    ]  # fmt: skip


def test_memory_that_other_gpus_do_not_reach_is_not_registered(fake: ctypes.CDLL):
    fake.fake_reset(22800, 0, 0, 0)
    communicator = joined()
    fake.fake_unreachable()
    assert not communicator.register(0x7F0000000000, 5_000_000_000)
    with pytest.raises(MbcError, match="MBC272: the plan sums gradients by copy engines, but these GPUs do not reach"):
        SymmetricMemory(load_nccl(), 4096).register(communicator)
    communicator.close()
    assert log(fake)[-2:] == ["finalize", "destroy"]


def test_an_old_nccl_is_refused(fake: ctypes.CDLL):
    fake.fake_reset(22605, 0, 0, 0)
    with pytest.raises(MbcError) as caught:
        load_nccl()
    assert caught.value.code == "MBC271" and "NCCL 2.26.5 is too old for CUDA 13" in caught.value.message
    assert caught.value.message.endswith("which need 2.27.0")
    assert "pip install 'mbc-compiler[nccl]'" in caught.value.remedy
    fake.fake_reset(23207, 0, 0, 0)
    assert Nccl(fake).version == 23207


def test_no_nccl(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl_library, "LIBRARY", "libnccl-absent.so.2")
    with pytest.raises(MbcError) as caught:
        load_nccl()
    assert caught.value.code == "MBC270" and "several GPUs need NCCL, which does not load" in caught.value.message


def test_another_library_of_its_name(tmp_path: Path):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to build a library to load")
    library = tmp_path / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", str(library)], check=True)
    with pytest.raises(MbcError, match="undefined symbol: nccl") as caught:
        open_nccl(library)
    assert caught.value.code == "MBC270"


def test_a_loaded_library_comes_first(fake: ctypes.CDLL, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl_library, "library_folders", lambda: ())
    monkeypatch.setattr(nccl_library, "loaded_folder", lambda prefix: folder)
    assert load_nccl().version == VERSION


@pytest.mark.parametrize(("set_to", "expected"), [(None, "0"), ("1", "1")])
def test_multicast_is_off_unless_the_user_says_otherwise(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, set_to: str | None, expected: str
):
    if set_to is None:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    else:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", set_to)
    load_nccl()
    assert os.environ["NCCL_NVLS_ENABLE"] == expected
