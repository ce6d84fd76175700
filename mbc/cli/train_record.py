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
    """Written as soon as enough steps were taken, or with `finish`."""

    def __init__(self, path: Path, device: str) -> None:
        """MBC320 where it could not be written, MBC365 where nothing could be recorded: better known before anything is
        planned."""
        self._tools = recording_tools(device)
        check_writable(path, OPTION)
        self._path = path
        self._recording: Recording | None = None
        self._step: MeasuredStep | None = None

    def open(self) -> int:
        """The listener of the module to be opened."""
        self._recording = Recording(self._tools)
        return self._recording.listener

    def check(self, net: Module) -> None:
        """MBC365 where the module runs on the CPU after all."""
        check_on_gpu(net.device)

    def on_step(self, net: Module) -> None:
        assert self._recording is not None
        self._recording.on_step(net)
        self._write(net)

    def finish(self, net: Module) -> None:
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
        """None where no step was taken."""
        return None if self._step is None else (self._path, self._step)
