"""Archives of unknown origin: pickles, headers with too large sizes, and data that unpack to more than the memory."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.train import archives
from mbc.train.data import open_data
from tests.train.test_data import INPUTS


def entry(array: np.ndarray) -> bytes:
    text = io.BytesIO()
    np.save(text, array)
    return text.getvalue()


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(MbcError) as caught:
        open_data(str(path), INPUTS)
    assert caught.value.code == "MBC172" and str(path) in caught.value.message
    return caught.value.message


def test_a_header_that_promises_terabytes(tmp_path: Path) -> None:
    array = np.zeros((1000, 3, 2, 2), np.float32)
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 3, 2, 2)})
    path = archive(tmp_path / "d.npz", x=text.getvalue() + array.tobytes())
    assert f"'x.npy' states {48 << 40} bytes, but has {array.nbytes}" in refused(path)


def test_more_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "d.npz", x=entry(np.zeros(1 << 20, np.uint8)))
    assert path.stat().st_size < 1 << 13
    monkeypatch.setattr(archives, "machine_memory_bytes", lambda: 1 << 19)
    assert "its unpacked size is 1.00 MiB, more than this machine's memory of 512.0 KiB" in refused(path)


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    class Acts:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return os.mkdir, (str(tmp_path / "acted"),)

    np.savez(tmp_path / "d.npz", allow_pickle=True, x=np.array([Acts()], object))
    assert "holds Python objects" in refused(tmp_path / "d.npz")
    assert not (tmp_path / "acted").exists()


def test_cut_short_and_damaged(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.npz", x=entry(np.arange(4096.0)), y=entry(np.arange(64))).read_bytes()
    draws = np.random.default_rng(0)
    for number in range(100):
        data = bytearray(whole[: draws.integers(1, len(whole))] if number % 2 else whole)
        for place in draws.integers(0, len(data), 3):
            data[place] ^= 1 << draws.integers(0, 8)
        (tmp_path / "d.npz").write_bytes(data)
        with pytest.raises(MbcError) as caught:  # of a readable file, too: it has no such arrays
            open_data(str(tmp_path / "d.npz"), INPUTS)
        assert caught.value.code in ("MBC172", "MBC173", "MBC174", "MBC175", "MBC176", "MBC232", "MBC233")


@pytest.mark.parametrize("name", ["d.npz", "d"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "it is not a regular file" in refused(tmp_path / name)


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(MbcError, match="it is not a regular file") as caught:
        open_data(str(tmp_path), INPUTS)
    assert caught.value.code == "MBC172"
