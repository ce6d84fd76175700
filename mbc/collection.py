"""Work with the cyclic garbage collector paused.

Planning, reading and showing a plan create millions of small values that live until the end and have no reference
cycles. The collector would search them again and again in vain: on deep networks for a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Turn the cyclic garbage collector off in the body, and restore its state afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
