"""This process as a rank: sums on the host, and what happens when a rank fails or Python ends."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mbc.ranks import member as process
from mbc.ranks.rank_group import Group


def test_a_sum_leaves_the_operand_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(total: Any) -> None:
        total *= 2

    group: Any = SimpleNamespace(call_on_failure=lambda act: None)
    monkeypatch.setattr(process.Member, "_mpi", SimpleNamespace(add=double))
    array = np.arange(3.0)
    assert (process.Member(group).sum_on_host(array) == [0, 2, 4]).all() and (array == [0, 1, 2]).all()


@pytest.mark.parametrize("failure", [None, "rank 1 ended"])
def test_a_failure_calls_what_was_asked_and_python_does_not_wait(
    failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Callable[[], None]] = []
    calls: list[str] = []
    group = SimpleNamespace(call_on_failure=ends.append, failure=failure, close=lambda: calls.append("closed"))
    monkeypatch.setattr(atexit, "register", ends.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored after the test
    monkeypatch.setattr(process, "read_environment", lambda variables: object())
    monkeypatch.setattr(Group, "open", lambda environment: group)
    member = process.joined.__wrapped__()
    assert member is not None
    member.on_failure(lambda: calls.append("failed"))
    fail, leave = ends
    leave()
    fail()
    assert calls == (["closed", "failed"] if failure is None else ["failed", "failed"])
