"""The GPU on which a context is opened."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from mbc.errors import MbcError
from mbc.runtime import driver
from tests.ranks.processes import variables


@pytest.mark.parametrize(
    ("given", "before", "expected"),
    [({}, None, None), ({}, "3", "3"), (variables(1, 2), None, "1"), (variables(1, 2), "3", "1")],
)
def test_each_rank_has_a_gpu_of_its_own(monkeypatch, given, before, expected):
    for name in ("CUDA_DEVICE", *variables(0, 2)):
        monkeypatch.delenv(name, raising=False)
    for name, value in (given | ({} if before is None else {"CUDA_DEVICE": before})).items():
        monkeypatch.setenv(name, value)
    asked: list[str | None] = []

    def load(name: str) -> SimpleNamespace:
        asked.append(os.environ.get("CUDA_DEVICE"))
        return SimpleNamespace(context=name)

    monkeypatch.setattr("mbc.runtime.driver.importlib.import_module", load)
    cuda = SimpleNamespace(Context=SimpleNamespace(get_current=lambda: None), Device=SimpleNamespace(count=lambda: 2))
    assert driver.open_context(cuda) == "pycuda.autoprimaryctx"
    assert asked == [expected] and os.environ.get("CUDA_DEVICE") == before
    for name, value in variables(2, 3).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MbcError, match="MBC266: rank 2 is number 2 of 3 on its machine, but sees only 2 GPUs"):
        driver.open_context(cuda)
