from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.processes import Ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.end()
