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
    """Return a record of a few steps of a built package on the same `inputs`.

    Args:
        package: The package's folder.
        device: Device as `Module` takes it.
        inputs: Inputs of every step by name.
        rate: The learning rate.
        seed: Seed of the module.
        records: Whether this process records. Of several ranks, those that do not record only take the steps, and get
            None.

    Raises:
        MbcError: The errors of `Recording`, `Module` and `recording_tools`.
    """
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
    """The part of `mbc.runtime.module.Module` that a recording needs."""

    @property
    def plan(self) -> Plan:
        """The module's plan."""
        ...

    @property
    def device(self) -> str:
        """The kind of device: `cuda` or `cpu`."""
        ...

    def wait(self) -> None:
        """Wait until the device has done all queued work."""
        ...


class Recording:
    """A recording of a module's first steps.

    Create it before the module, which gets its `listener`, and call `on_step` after every step. The recording ends
    after `WARM_STEPS` plus `STEPS` steps, or with `finish`, and releases CUPTI; then `step` holds the result.
    """

    def __init__(self, tools: Toolchain) -> None:
        """Start a recorder, which `tools` compile."""
        self._recorder = Recorder(tools)
        self._steps = 0
        self.step: RecordedStep | None = None

    @property
    def listener(self) -> int:
        """Address that the module gets as its `listener`."""
        return self._recorder.listener

    def on_step(self, net: Recorded) -> None:
        """Count a step, and finish after the last step to record."""
        self._steps += 1
        if self._steps >= WARM_STEPS + STEPS:
            self.finish(net)

    def finish(self, net: Recorded) -> None:
        """End the recording; if fewer steps were taken, the steps after the warm ones count, or else the last step.

        Raises:
            MbcError: MBC366 if CUPTI recorded none of the steps.
        """
        if self.step is not None or not self._steps:
            return
        net.wait()
        try:
            self.step = recorded_step(net.plan, self._recorder.stop(), WARM_STEPS)
        finally:
            self._recorder.close()
