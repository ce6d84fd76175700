"""Small networks in which operands of gradients are gathered although they are small."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from mbc.passes import gather_operands


@contextmanager
def small_gradients_are_gathered() -> Generator[None]:
    """Let operands of all gradients be gathered while a source is compiled, however small they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_operands, "LEAST_BYTES", 0)
        yield
