"""A process that copies nothing with the host and reports invented rates.

The rates depend on the GPU's index and on the number of directions. With `refuses`, `dies`, `hangs` or `stalls`, the
process does so.
"""

from __future__ import annotations

import os
import sys
import time

from mbc.measure.gpu import DoesNotFit
from mbc.measure.gpu_processes import serve
from mbc.measure.shared_copies import WINDOW_S
from tests.profile.profiles import IDENTITY

BEHAVIOUR = sys.argv[1] if len(sys.argv) > 1 else ""


def work(index, say):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == str(index)
    print("what a library prints")
    if BEHAVIOUR == "refuses" and index == 1:
        raise DoesNotFit("all of it is needed, nothing is left")
    asked = yield IDENTITY
    while True:
        assert asked.begin_s > time.monotonic() - WINDOW_S
        if BEHAVIOUR == "dies" and index == 1:
            os._exit(7)
        if BEHAVIOUR == "hangs" and index == 1:
            time.sleep(60)
        rate = 0.0 if BEHAVIOUR == "stalls" else 50.0 - index
        asked = yield {direction: rate / len(asked.directions) for direction in asked.directions}


if __name__ == "__main__":
    serve(work)
