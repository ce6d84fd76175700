"""Memory outside the arena is asked of NVML; without it the message says what is missing."""

from __future__ import annotations

import ctypes

import pytest

from mbc.device.overhead import Meter
from mbc.errors import MbcError


def test_missing_nvml_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(MbcError, match="none can be used here: NVML is missing") as caught:
        Meter()
    assert caught.value.code == "MBC077"


def test_a_failing_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        def nvmlInit_v2(self) -> int:
            return 9

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    with pytest.raises(MbcError, match="nvmlInit_v2 failed with NVML error 9"):
        Meter()
