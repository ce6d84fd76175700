"""A process that stands for one rank and measures no collectives.

With `dies`, `hangs` or `refuses`, rank 1 does so after all ranks have met.
"""

from __future__ import annotations

import os
import sys
import time

from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveKind, CollectiveSlowdown, CollectiveTime, ConcurrentKernel
from mbc.measure.collective_fleet import Measured
from mbc.measure.gpu_processes import serve
from mbc.profile.model import Overhead, collective_subject
from tests.profile.profiles import IDENTITY

BEHAVIOUR = sys.argv[1] if len(sys.argv) > 1 else ""


def work(task, say):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == str(task.rank)
    print("what a library prints")
    max_ctas, unique_id = yield (IDENTITY, tuple(bytes([n]) for n in task.max_ctas)) if task.rank == 0 else None
    while True:
        assert unique_id == bytes([max_ctas])
        if BEHAVIOUR and max_ctas == task.max_ctas[1]:
            if task.rank == 1 and BEHAVIOUR == "dies":
                os._exit(7)
            if task.rank == 1 and BEHAVIOUR == "refuses":
                raise MbcError("MBC272", "rank 0 is gone", "look there")
            time.sleep(600)  # the other rank waits for it
        if task.rank == 0:
            say(f"{max_ctas} thread blocks")
        measured_time = CollectiveTime(
            CollectiveKind.ALL_REDUCE, task.ranks, task.link, max_ctas, 4, 10.0 * max_ctas, 1.0
        )
        slow = CollectiveSlowdown(ConcurrentKernel.GEMM, task.ranks, task.link, max_ctas, 1.5, 2.0)
        memory = Overhead("collectives", collective_subject(task.ranks, max_ctas), 1 << 20)
        max_ctas, unique_id = yield Measured((measured_time,), (slow,), (memory,))


if __name__ == "__main__":
    serve(work)
