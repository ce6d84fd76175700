"""The thread in which PyTorch computes backward passes on a GPU: the calling thread while a plan is open there.

PyTorch's own thread for a GPU takes some 9 us for each parameter. The setting belongs to a thread rather than to a
model, so that one object switches it and gives it back, whether a plan is closed or its model is deleted.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

torch: Any = importlib.import_module("torch")


class CallingThread:
    """The calling thread of one planned model, once PyTorch computes backward passes in it."""

    def __init__(self) -> None:
        """Leave PyTorch's setting as it is."""
        self._thread: int | None = None

    def keep(self, device: str) -> None:
        """Make PyTorch compute the backward passes of this thread in the thread itself, for a plan on a GPU."""
        if device == "cuda" and torch._C._is_multithreading_enabled():
            torch._C._set_multithreading_enabled(False)
            self._thread = threading.get_ident()

    def release(self) -> None:
        """Undo what `keep` has set, in the thread that called `keep`; in another thread change nothing."""
        if self._thread == threading.get_ident():
            torch._C._set_multithreading_enabled(True)
            self._thread = None
