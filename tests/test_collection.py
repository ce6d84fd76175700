"""Garbage collection is off while a plan is made and restored afterwards, whatever happens."""

import gc

import pytest

from mbc.collection import uncollected


def test_the_collector_is_as_it_was_also_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), uncollected():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
