"""The pinned memory of all ranks of a machine is counted together, before any rank pins it."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from mbc.errors import MbcError
from mbc.runtime import pinned
from mbc.runtime.membership import Membership
from mbc.runtime.pinned import check_together


class Told:
    """Messages of the other ranks: their machine, bytes to pin, and available bytes."""

    def __init__(self, *others: tuple[str, int, int | None]) -> None:
        self.others = others

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        return payload, *(json.dumps(other).encode() for other in self.others)


def check(monkeypatch: pytest.MonkeyPatch, available: int | None, size_bytes: int, *others: Any) -> bool:
    """Return True if nothing is raised."""
    monkeypatch.setattr(pinned, "available_bytes", lambda: available)
    monkeypatch.setattr(pinned, "_machine", lambda: "here")
    check_together(cast(Membership, Told(*others)), size_bytes)
    return True


def test_pinned_memory_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, 100, 60, ("here", 40, 100))
    assert check(monkeypatch, 100, 60, ("there", 60, 100), ("there", 40, 110))
    assert check(monkeypatch, None, 60, ("here", 60, None))
    assert check(monkeypatch, 100, 0, ("here", 0, 0))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (
            (("here", 60, 110),),
            "2 ranks on one machine move values to 120 bytes of pinned host memory together: only 100 are",
        ),
        ((("there", 60, 90), ("there", 60, 100)), "120 bytes of pinned host memory together: only 90 are available"),
    ],
)
def test_what_does_not(monkeypatch: pytest.MonkeyPatch, others: Any, words: str) -> None:
    with pytest.raises(MbcError) as caught:
        check(monkeypatch, 100, 60, *others)
    assert caught.value.code == "MBC361" and words in caught.value.message


def test_this_machine_has_one_name() -> None:
    assert pinned._machine() == pinned._machine() != ""
