"""A recorder around the first steps of a module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mbc.codegen.toolchain import Toolchain
from mbc.plan.model import Plan
from mbc.record.recorder import Recorder, check_on_gpu, recording_tools
from mbc.record.step import RecordedStep, recorded_step
from mbc.runtime.module import Module

WARM_STEPS = 5
STEPS = 10


def record_package(
    package: Path, device: str, inputs: Mapping[str, Any], rate: float, seed: int = 0, records: bool = True
) -> RecordedStep | None:
    """A few steps of a built package on the same `inputs`, recorded. `records`: where not, of several ranks, this one
    only takes the steps of the others. Raises what `Recording`, `Module` and `recording_tools` do."""
    recording = Recording(recording_tools(device)) if records else None
    listener = None if recording is None else recording.listener
    with Module(package, seed=seed, device=device, shadow=False, listener=listener) as net:
        check_on_gpu(net.device)
        for _ in range(WARM_STEPS + STEPS):
            net.step(**inputs, lr=rate)
            if recording is not None:
                recording.on_step(net)
        net.wait()
    return None if recording is None else recording.step


class Recorded(Protocol):
    """What a recording needs of `mbc.runtime.module.Module`."""

    @property
    def plan(self) -> Plan: ...

    @property
    def device(self) -> str: ...

    def wait(self) -> None: ...


class Recording:
    """To be opened before the module is, which gets its `listener`; `on_step` is called after every step. It ends, and
    CUPTI with it, after `WARM_STEPS` and `STEPS` steps, or with `finish`: then `step` is there."""

    def __init__(self, tools: Toolchain) -> None:
        self._recorder = Recorder(tools)
        self._steps = 0
        self.step: RecordedStep | None = None

    @property
    def listener(self) -> int:
        return self._recorder.listener

    def on_step(self, net: Recorded) -> None:
        self._steps += 1
        if self._steps >= WARM_STEPS + STEPS:
            self.finish(net)

    def finish(self, net: Recorded) -> None:
        """Where fewer steps were taken those count that are not among the warm ones, or the last one. MBC366 where
        CUPTI recorded none of them."""
        if self.step is not None or not self._steps:
            return
        net.wait()
        try:
            self.step = recorded_step(net.plan, self._recorder.stop(), WARM_STEPS)
        finally:
            self._recorder.close()
