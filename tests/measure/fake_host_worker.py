"""A process that copies nothing with the host and reports invented rates.

The rates depend on the GPU's index and on the number of directions. With `refuses`, `dies`, `hangs` or `stalls`, the
process does so.
"""

from __future__ import annotations

import os
import sys
import time

from mbc.measure.collective_worker import serve
from mbc.measure.gpu import DoesNotFit
from mbc.measure.shared_copies import WINDOW_S
from tests.profile.profiles import IDENTITY

BEHAVIOUR = sys.argv[1] if len(sys.argv) > 1 else ""


def work(index, say, receive):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == str(index)
    print("what a library prints")
    if BEHAVIOUR == "refuses" and index == 1:
        raise DoesNotFit("all of it is needed, nothing is left")
    say(("ready", IDENTITY))
    while True:
        asked = receive()
        assert asked.begin_s > time.monotonic() - WINDOW_S
        if BEHAVIOUR == "dies" and index == 1:
            os._exit(7)
        if BEHAVIOUR == "hangs" and index == 1:
            time.sleep(60)
        rate = 0.0 if BEHAVIOUR == "stalls" else 50.0 - index
        say(("rates", {direction: rate / len(asked.directions) for direction in asked.directions}))


if __name__ == "__main__":
    serve(work)
