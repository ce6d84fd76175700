"""The process of one contender, which reads a job and a contender from stdin and writes the result to stdout.

A process that mpiexec starts gets files in place of stdin and stdout, and one for stderr.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys

from mbc.bench.contender_messages import MBC, PACKAGES, Contender, Job, Result

_MODULES = {
    MBC: "mbc_contender",
    "torch": "torch_contender",
    "torch.compile": "torch_contender",
    "jax": "jax_contender",
}


def run(job: Job, contender: Contender) -> Result:
    """Run a contender in this process; a package that is not installed is the problem of the result, not an error."""
    try:
        module = importlib.import_module(f"mbc.bench.{_MODULES[contender.peer]}")
    except ImportError as error:
        return Result(problem=f"{PACKAGES.get(contender.peer, contender.peer)} is not installed ({error})")
    return module.run(job, contender)


def main() -> None:
    """Run the contender of stdin, or of the files on the command line."""
    for stream, place in enumerate(sys.argv[1:]):
        os.dup2(os.open(place, (os.O_WRONLY | os.O_CREAT) if stream else os.O_RDONLY), stream)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the result
    job, contender = pickle.load(sys.stdin.buffer)
    if job.share.alone:
        pickle.dump(run(job, contender), answer)
        answer.close()
        return
    # A rank of PyTorch, and one that failed, ends at once: to destroy communicators needs the other ranks, which may
    # have failed. A rank of mbc notifies the others when it ends.
    status = 1
    try:
        pickle.dump(run(job, contender), answer)
        answer.close()
        status = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        if status or contender.peer != MBC:
            os._exit(status)


if __name__ == "__main__":
    main()
