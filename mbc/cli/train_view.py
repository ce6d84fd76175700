"""The progress of `mbc train` while it runs."""

from __future__ import annotations

from collections.abc import Mapping

from mbc.cli.terminal import bar
from mbc.progress import StatusLine
from mbc.train.data import Data
from mbc.train.divergence import named
from mbc.train.epoch import Epoch, Running
from mbc.units import show_duration, show_rate

TOLERATED_WAIT = 0.01  # share of an epoch spent waiting for data that is not reported


def show_loss(shown: Running | Epoch) -> str:
    """Format a mean loss, with the number of steps it covers where some were skipped."""
    number = f"{shown.loss:.4f}" if abs(shown.loss) < 1e6 else f"{shown.loss:.3e}"
    over = f" (mean of {shown.steps - shown.bad_steps:,} of {shown.steps:,} steps)" if shown.bad_steps else ""
    return f"loss {number}{over}"


def _named(metrics: Mapping[str, float], of: str = "") -> list[str]:
    """Format the metrics of the source, whose unit is unknown."""
    return [f"{of}{name} {value:.4g}" for name, value in metrics.items()]


class View:
    """The progress of a training on stderr."""

    def __init__(self, data: Data, batch: int) -> None:
        """Note the rows that do not fill a mini-batch."""
        self._line = StatusLine()
        self._said_dropped = False
        self._batch = batch
        if data.rows is not None and data.rows % batch and data.rows > batch:
            self._say_dropped(data.rows % batch)

    def on_step(self, now: Running) -> None:
        """Show the state of the epoch that runs."""
        if not self._line.due():
            return
        parts = [f"epoch {now.epoch:>{len(str(now.epochs))}}/{now.epochs}"]
        if now.steps_in_epoch is not None:
            share = now.steps / now.steps_in_epoch
            parts.append(f"{bar(share)} {share:4.0%}")
        else:
            parts.append(f"step {now.steps}")
        parts.append(show_loss(now))
        if now.accuracy is not None:
            parts.append(f"accuracy {now.accuracy:.1%}")
        parts += _named(now.metrics)
        parts.append(f"{show_rate(now.rows / max(now.seconds, 1e-9))} images/s")
        self._line.update("  ".join(parts))

    def on_epoch(self, epoch: Epoch) -> None:
        """Print the figures of a finished epoch."""
        if epoch.dropped_rows:
            self._say_dropped(epoch.dropped_rows)
        parts = [f"epoch {epoch.epoch:>{len(str(epoch.epochs))}}/{epoch.epochs}"]
        parts.append(show_loss(epoch))
        if epoch.accuracy is not None:
            parts.append(f"accuracy {epoch.accuracy:.1%}")
        parts += _named(epoch.metrics)
        if epoch.test_accuracy is not None:
            parts.append(f"test accuracy {epoch.test_accuracy:.2%}")
        parts += _named(epoch.test_metrics, "test ")
        parts.append(f"{show_rate(epoch.rows / max(epoch.seconds, 1e-9))} images/s")
        if epoch.waited_seconds > TOLERATED_WAIT * epoch.seconds:
            seconds, share = epoch.waited_seconds, epoch.waited_seconds / epoch.seconds
            shown = f"{seconds:.2g} s" if seconds < 10 else show_duration(seconds)
            parts.append(f"waited for data {share:.0%} ({shown})")
        if epoch.bad_steps:
            steps = "1 step" if epoch.bad_steps == 1 else f"{epoch.bad_steps} steps"
            parts.append(
                f"({steps} with a loss that is not finite changed nothing, the first is step {epoch.first_bad_step}"
                f"{named(epoch.bad_states)})"
            )
        if epoch.overflowed_steps:
            steps = "1 step was" if epoch.overflowed_steps == 1 else f"{epoch.overflowed_steps} steps were"
            parts.append(f"({steps} skipped for gradients that fp16 cannot hold: the loss scale was lowered)")
        self._line.line("  ".join(parts))

    def note(self, text: str) -> None:
        """Print a note."""
        self._line.line(f"note: {text}")

    def stop(self) -> None:
        """Clear the status line."""
        self._line.clear()

    def _say_dropped(self, rows: int) -> None:
        if not self._said_dropped:
            self._said_dropped = True
            self.note(f"the last {rows} rows of each epoch do not fill a mini-batch of {self._batch} and are dropped")
