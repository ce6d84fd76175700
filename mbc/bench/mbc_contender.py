"""A package of mbc as a contender."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mbc.bench.contender_messages import LOSS_SCALE, Contender, Job, Result
from mbc.bench.timing import Timing, host_between_ms, host_mark, time_each_step, time_steps
from mbc.ir.types import Precision
from mbc.record.recording import record_package
from mbc.runtime.checkpoint import write_checkpoint
from mbc.runtime.module import Module
from mbc.version import __version__


def run(job: Job, _: Contender) -> Result:
    """Train and time a package of mbc.

    A rank of several opens the common package, reads its rank from the environment, and steps with its own rows. The
    loss of a step is that of the global mini-batch.
    """
    if job.record:
        package, first = Path(job.package), job.share.rank == 0
        return Result(recorded=record_package(package, job.device, job.inputs(0), job.learning_rate, job.seed, first))
    graph = job.graph()
    batches = [job.inputs(number) for number in range(job.losses)]
    began = time.perf_counter()
    package = job.alone_package if job.share.alone and job.share.ranks > 1 else job.package
    with Module(Path(package), seed=job.seed, device=job.device, shadow=False) as net:
        if graph.precision is Precision.FP16:
            start_scale(net)
        losses = [float(net.step(**batches[0], lr=job.learning_rate))]
        first_step_s = job.made_s + time.perf_counter() - began
        losses += [float(net.step(**batch, lr=job.learning_rate)) for batch in batches[1:]]
        arrays: list[Any] = [batches[0][name] for name in graph.inputs]
        if job.device == "cuda":
            to_gpu = importlib.import_module("pycuda.gpuarray").to_gpu
            arrays = [to_gpu(array) for array in arrays]
        last: list[Any] = [0.0]

        def step() -> None:
            last[0] = net.step(*arrays, lr=job.learning_rate)

        timing = _timed(job, step, lambda: float(last[0]))
        memory = net.memory
        return Result(
            tuple(losses),
            timing.step_ms,
            timing.spread_ms,
            timing.steps,
            first_step_s,
            memory.arena_taken + memory.prefetch_taken,
            memory.arena_taken + memory.prefetch_taken + (memory.overhead_taken or 0),
            f"mbc {__version__}",
        )


def _timed(job: Job, step: Callable[[], None], wait: Callable[[], float]) -> Timing:
    if job.share.ranks == 1:
        return time_steps(step, wait, job.blocks, job.block_s)
    if job.device != "cuda":
        return time_each_step(step, host_mark, host_between_ms, job.timed_steps)
    driver: Any = importlib.import_module("pycuda.driver")

    def event() -> Any:  # the default stream is ordered with the module's stream
        mark = driver.Event()
        mark.record()
        return mark

    def between_ms(before: Any, after: Any) -> float:
        wait()  # the module notices a rank that failed
        after.synchronize()
        return before.time_till(after)

    return time_each_step(step, event, between_ms, job.timed_steps)


def start_scale(net: Module) -> None:
    """Set the loss scale to that of all contenders."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scale.safetensors"
        write_checkpoint(file, [("control.loss_scale", np.array([LOSS_SCALE], np.float32))], {})
        net.load(file, strict=False)
