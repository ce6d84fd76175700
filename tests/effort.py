"""The effort of tests that draw their cases: few cases in every run, more if marked exhaustive."""

from __future__ import annotations

import os

ALL_TESTS = bool(os.environ.get("MBC_ALL_TESTS"))


def examples(quick: int, exhaustive: int) -> int:
    return exhaustive if ALL_TESTS else quick
