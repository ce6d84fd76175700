"""The process of one contender: a job and the contender come in by stdin, the result goes out by stdout."""

from __future__ import annotations

import importlib
import os
import pickle
import sys

from mbc.bench.job import MBC, PACKAGES, Contender, Job, Result

_MODULES = {
    MBC: "mbc_contender",
    "torch": "torch_contender",
    "torch.compile": "torch_contender",
    "jax": "jax_contender",
}


def run(job: Job, contender: Contender) -> Result:
    """In this process. What is not installed is the problem of the result, not an error."""
    try:
        module = importlib.import_module(f"mbc.bench.{_MODULES[contender.peer]}")
    except ImportError as error:
        return Result(problem=f"{PACKAGES.get(contender.peer, contender.peer)} is not installed ({error})")
    return module.run(job, contender)


def main() -> None:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between
    job, contender = pickle.load(sys.stdin.buffer)
    pickle.dump(run(job, contender), answer)
    answer.close()


if __name__ == "__main__":
    main()
