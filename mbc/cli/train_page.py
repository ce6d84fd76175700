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
    """The plan as a page with the curves of a training."""

    def __init__(self, path: Path, log: Path | None) -> None:
        """Check that the page can be written, before anything is planned.

        Args:
            path: Page to write.
            log: Log of the training, which also has the figures from before a resume; None without one.

        Raises:
            MbcError: MBC320, the page cannot be written.
        """
        self._path, self._log = path, log
        self._lines: list[Fields] = []
        self._others: tuple[Plan, ...] = ()
        check_writable(path, OPTION)

    def show_ranks(self, plans: Sequence[Plan]) -> None:
        """Show the plans of all ranks. The first plan must be that of the rank that writes the page."""
        self._others = tuple(plans[1:])

    def tell(self, figures: Interval | Epoch) -> None:
        """Add the figures of an interval or an epoch; a callback of `train`."""
        self._lines.append(fields_of(figures))

    def write(self, plan: Plan, measured: MeasuredStep | None = None) -> Path | None:
        """Write the page, with the `measured` step; return its path, or None if no step was run."""
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
