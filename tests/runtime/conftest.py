"""A simulated GPU."""

from __future__ import annotations

import sys

import pytest

from mbc.runtime import cuda, lender, usage
from tests.runtime.fake_pycuda import FakeLibrary, Gpu, modules


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A fake GPU, with fake PyCUDA and a library that interprets."""
    machine = Gpu()
    FakeLibrary.instances = []
    for name, module in modules(machine).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cuda, "Library", FakeLibrary)
    monkeypatch.setattr(lender, "_contexts", {})
    monkeypatch.setattr(usage, "used_bytes", lambda address: 1000 + sum(len(a.raw) for a in machine.allocations))
    return machine
