"""Waiting for the GPU where other ranks may fail meanwhile: their part of a collective then never comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.runtime.membership import Membership
from mbc.runtime.nccl import Communicator

_POLL_S = 1e-4
_SPIN_S = 1e-3  # polled without sleeping for so long


@dataclass(frozen=True, slots=True)
class Patience:
    """Of one rank."""

    members: Membership
    communicator: Communicator

    def wait(self, done: Callable[[], bool]) -> None:
        """Until `done()`. Raises the reason of the first rank that fails meanwhile; slow ones are waited for."""
        began_s = time.monotonic()
        while not done():
            self.members.check()
            try:
                self.communicator.check()
            except MbcError:
                self.members.check()  # which aborts the communicator when a rank fails
                raise
            if time.monotonic() - began_s > _SPIN_S:
                time.sleep(_POLL_S)
