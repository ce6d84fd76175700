"""A process that measures no copies between GPUs. As its argument says, it repeats its request, fails or dies."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.measure.gpu_processes import serve
from tests.profile.profiles import IDENTITY

BEHAVIOUR = sys.argv[1] if len(sys.argv) > 1 else ""


def work(task, say):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    print("what a library prints")
    if BEHAVIOUR == "dies":
        os._exit(7)
    spec = find_spec("h200")
    yield IDENTITY, replace(spec.host_link, to_host_gb_s=48.0, measured=True)
    if BEHAVIOUR == "refuses":
        raise MbcError("MBC105", "no peer access", "look there")
    yield IDENTITY, replace(spec.peer_link, to_peer_gb_s=390.0, measured=True)


if __name__ == "__main__":
    serve(work)
