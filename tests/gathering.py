"""Small networks in which operands of gradients are gathered all the same."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from mbc.passes import gather_operands


@contextmanager
def small_gradients_are_gathered() -> Generator[None]:
    """While its source is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_operands, "LEAST_BYTES", 0)
        yield
