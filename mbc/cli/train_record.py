"""The record of a step that `mbc train --record` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mbc.record.recorder import check_on_gpu, recording_tools
from mbc.record.recording import Recording
from mbc.report.html.render import check_writable, write_text
from mbc.report.step_record import dump_record, record_document

if TYPE_CHECKING:
    from mbc.report.measured import MeasuredStep
    from mbc.runtime.module import Module

OPTION = "--record"


class TrainRecord:
    """The record of a training step, written as soon as enough steps ran, or by `finish`."""

    def __init__(self, path: Path, device: str) -> None:
        """Check that a record can be made and written, before anything is planned.

        Raises:
            MbcError: MBC320, the file cannot be written; MBC365, nothing can be recorded on this device.
        """
        self._tools = recording_tools(device)
        check_writable(path, OPTION)
        self._path = path
        self._recording: Recording | None = None
        self._step: MeasuredStep | None = None

    def open(self) -> int:
        """Return the listener for the module that is to be recorded."""
        self._recording = Recording(self._tools)
        return self._recording.listener

    def check(self, net: Module) -> None:
        """Raise MBC365 if the module runs on the CPU."""
        check_on_gpu(net.device)

    def on_step(self, net: Module) -> None:
        """Record a step, and write the record once enough steps ran."""
        assert self._recording is not None
        self._recording.on_step(net)
        self._write(net)

    def finish(self, net: Module) -> None:
        """Write the record of the steps so far, unless it is written already."""
        assert self._recording is not None
        self._recording.finish(net)
        self._write(net)

    def _write(self, net: Module) -> None:
        recorded = None if self._recording is None else self._recording.step
        if recorded is None or self._step is not None:
            return
        from mbc.report.measured import measured_step

        document = record_document(net.plan, recorded)
        self._step = measured_step(net.plan, document, str(self._path))
        write_text(self._path, dump_record(document), OPTION)

    @property
    def written(self) -> tuple[Path, MeasuredStep] | None:
        """Path and measured step of the record; None if no step was recorded."""
        return None if self._step is None else (self._path, self._step)
