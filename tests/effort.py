"""How much tests that draw their cases do: little in every run, more with those marked exhaustive."""

from __future__ import annotations

import os


def examples(quick: int, exhaustive: int) -> int:
    return exhaustive if os.environ.get("MBC_ALL_TESTS") else quick
