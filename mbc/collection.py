"""Work with the cyclic garbage collector paused.

Planning, reading and showing a plan make millions of small values that live until the end and refer to each other in no
circle. The collector looks through all of them again and again, for nothing: on deep networks a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """The cyclic garbage collector is off inside; as it was behind."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
