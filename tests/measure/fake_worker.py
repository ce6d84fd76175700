"""A process that measures without a GPU, like `mbc.measure.worker`: `python -m tests.measure.fake_worker BEHAVIOUR`.

`stays`: waits at its second request until its input ends. `dies`: ends without a message at its second request.
`refuses`: fails as a GPU would. `trips`: fails once with MBC088 after its first request, and continues when it is
started again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from functools import partial

from mbc.errors import MbcError
from mbc.measure.gpu_processes import serve
from mbc.measure.measure import Summary
from mbc.measure.worker import work
from mbc.profile.signature import signature
from mbc.profile.writer import ProfileWriter
from mbc.progress import announce
from tests.profile.profiles import IDENTITY, measurement

BEHAVIOUR = sys.argv[1] if len(sys.argv) > 1 else ""


def measuring(gpu, needs, path, measure_for_s, workspace_limit_bytes, progress, again, link, decide, outdated):
    assert gpu == os.environ["CUDA_VISIBLE_DEVICES"] and os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    print("what a library prints")
    requests = [r for need in needs for r in need.requests]
    announce("compiling kernels")
    done = 0
    with ProfileWriter(path, IDENTITY) as writer:
        recorded = writer.signatures() if not again else frozenset()
        missing = [r for r in requests if signature(r) not in recorded]
        if decide is not None:
            chosen = decide((), [signature(r) for r in missing]).requests
            missing = [r for r in missing if signature(r) in chosen]
        try:
            for done, request in enumerate(missing):
                progress(done, len(missing), request, 1.0 * (len(missing) - done))
                if BEHAVIOUR == "dies" and done == 1:
                    os._exit(7)
                if BEHAVIOUR == "refuses":
                    raise MbcError("MBC077", "no GPU", "run `mbc doctor`")
                while BEHAVIOUR == "stays" and done == 1:
                    time.sleep(0.05)
                    progress(done, len(missing), request, 1.0)  # raises when the input has ended
                writer.record(request, [measurement(1, 10.0)])
                if BEHAVIOUR == "trips" and not recorded:
                    raise MbcError("MBC088", "the GPU failed", "run it again")
            done = len(missing)
        except KeyboardInterrupt:
            return Summary(done, len(recorded), len(missing) - done, interrupted=True)
    return Summary(
        done, len(requests) - len(missing), 0, done, failures=(f"on {gpu}",), link_failure=f"{gpu}" if link else ""
    )


if __name__ == "__main__":
    serve(partial(work, lambda task: contextlib.nullcontext(os.environ["CUDA_VISIBLE_DEVICES"]), measuring))
