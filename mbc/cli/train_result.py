"""The result that `mbc train` prints at its end."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from mbc.cli.train_arguments import Prepared
from mbc.cli.train_view import show_loss
from mbc.train.epoch import Epoch
from mbc.train.job import Job
from mbc.train.training_checkpoint import read_progress

if TYPE_CHECKING:
    from mbc.runtime.module import Module


def report(prepared: Prepared, job: Job, history: tuple[Epoch, ...], net: Module, reached: bool) -> None:
    """Print the result of a training and the files that it wrote; `reached` says whether it reached its target."""
    target = job.resolved_target()
    arguments, checkpoint, best, device = prepared.arguments, prepared.checkpoint, prepared.best, net.device
    record = None if prepared.record is None else prepared.record.written
    page = None if prepared.page is None else prepared.page.write(net.plan, None if record is None else record[1])
    if arguments.json:
        result = {
            "device": device,
            "ranks": net.ranks,
            "epochs": [asdict(epoch) for epoch in history],
            "target": None if target is None else {"metric": target.by.name, "value": target.value, "reached": reached},
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "best": None if best is None else str(best),
            "ema": None if prepared.ema is None else str(prepared.ema),
            "report": None if page is None else str(page),
            "record": None if record is None else str(record[0]),
        }
        print(json.dumps(result, indent=2))
        return
    aimed = "" if target is None else f"{target.by.name} {target.value:g}"
    if not history:
        reason = f"reached {aimed}" if target is not None and reached else f"completed all {arguments.epochs} epochs"
        print(f"nothing to do: '{prepared.resume}' has {reason}")
        return
    last = history[-1]
    if target is not None and reached:
        print(f"the target {aimed} is reached after epoch {last.epoch}: {target.by.of(last):.4f}")
    after = f"after {last.epoch} epoch{'s' if last.epoch > 1 else ''} ({device})"
    if last.test_accuracy is not None:
        of = " of the moving averages" if arguments.evaluate == "ema" else ""
        print(f"test accuracy{of}: {last.test_accuracy:.2%} {after}")
    else:
        print(f"{show_loss(last)} {after}")
    if checkpoint is not None:
        print(f"weights: {checkpoint}")
    if prepared.ema is not None:
        print(f"moving averages: {prepared.ema}")
    if page is not None:
        print(f"page: {page}")
    if record is not None:
        print(f"record of a step: {record[0]}")
    if best is not None and best.exists():
        progress = read_progress(best)
        metric = "" if progress.best is None else f", {progress.best.metric} {progress.best.value:.4f}"
        print(f"best weights: {best} (epoch {progress.epochs}{metric})")
