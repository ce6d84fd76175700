"""The page that `mbc train --report` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mbc.cli.subject import read_text
from mbc.plan.model import Plan
from mbc.progress import busy
from mbc.report.html.render import check_writable, write_text
from mbc.report.measured import MeasuredStep
from mbc.train.epoch import Epoch, Interval
from mbc.train.logs import Fields, fields_of

OPTION = "--report"


class TrainPage:
    """The plan with the curves of a training; `tell` is a callback of `train`. `log`: where the training also writes
    its figures. Those of the part before a resume are shown from there."""

    def __init__(self, path: Path, log: Path | None) -> None:
        """MBC320 where it could not be written: better known before anything is planned."""
        self._path, self._log = path, log
        self._lines: list[Fields] = []
        self._others: tuple[Plan, ...] = ()
        check_writable(path, OPTION)

    def show_ranks(self, plans: Sequence[Plan]) -> None:
        """Where several ranks train: `plans` of all of them, the first that of the rank whose plan is written."""
        self._others = tuple(plans[1:])

    def tell(self, told: Interval | Epoch) -> None:
        self._lines.append(fields_of(told))

    def write(self, plan: Plan, measured: MeasuredStep | None = None) -> Path | None:
        """The page, with the step that was `measured`; None where no step was taken."""
        from mbc.report.html.plan_page import plan_page
        from mbc.report.html.recorded import read_recorded, training

        if not self._lines:
            return None
        log = self._log
        shown = training(self._lines) if log is None else read_recorded(read_text(log), str(log))
        with busy(f"writing {self._path}"):
            text = plan_page(plan, recorded=[shown], measured=measured, others=self._others)
            write_text(self._path, text, OPTION)
        return self._path
