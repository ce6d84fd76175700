"""The command `mbc tune`."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mbc.cli.arguments.settings_file import settings_text
from mbc.cli.arguments.shared import options
from mbc.cli.outputs import check_outputs
from mbc.cli.subject import builds_package, read_source
from mbc.cli.terminal import notes, output_width
from mbc.cli.tune_target import SCHEDULE, check_metric, check_target, epochs_to_target
from mbc.errors import MbcError
from mbc.fit import MOST_BATCH, Probe, own_batch, with_batch, with_budget
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.frontend.sections import optimizer_text
from mbc.ir.kept_gradients import check_updates
from mbc.options import Options
from mbc.plan.require_times import require_predicted_times
from mbc.progress import busy
from mbc.report.fit import batch_line
from mbc.report.tune import tune_document, tune_text
from mbc.runtime.replace import replace_file
from mbc.train.accuracy import inputs_of
from mbc.train.data import Data, check_place, open_data
from mbc.train.training_checkpoint import check_writable
from mbc.tune.batch_ladder import climb, gpu_counts
from mbc.tune.goodput import Base, Row, Table, Tried, row_efficiency, table
from mbc.tune.measured_noise import check_halves
from mbc.tune.rates import USUAL_RULES, WARM_UP_SHARE
from mbc.tune.tuner import Spending, find_rate, measure, spending
from mbc.tune.tuning_file import open_state

if TYPE_CHECKING:
    from mbc.plan.model import Plan
    from mbc.runtime.module import Module

Say = Callable[[str], None]


def run(arguments: argparse.Namespace) -> int:
    """Plan a ladder of mini-batches, measure the noise scale of gradients, and print the best batch and learning rate.

    Each probe is printed on stderr as soon as it is planned. After Ctrl-C a tuning with --state continues from its
    probes.
    """
    check_outputs(
        {"-o": arguments.output, "--state": arguments.state}, {"NET": arguments.source, "--data": arguments.data}
    )
    tuning = _Tuning(arguments)
    with notes():
        with busy(f"tuning {arguments.source}") as at:
            spent = tuning.train(at) if not arguments.dry_run else None
            result = tuning.table(at, at.line)
        epochs = None if arguments.target is None or arguments.dry_run else tuning.epochs(result)
    if arguments.output is not None:
        tuning.write(result, epochs)
    base, state = tuning.base, tuning.state
    if arguments.json:
        to_train = epochs or tuning.equivalent_epochs(result)
        print(json.dumps({**tune_document(result, base, state, spent), "epochs": to_train}, indent=2))
        return 0
    print(tune_text(result, base, state, spent, output_width()))
    if (as_many := tuning.equivalent_epochs(result)) > arguments.epochs:
        print(f"{as_many} epochs of it train as far as the {arguments.epochs} requested epochs at the base batch")
    if epochs is not None:
        print(f"the target is reached after {epochs} epochs")
    if arguments.output is not None:
        print(
            f"train with: mbc train {arguments.source} --data {arguments.data or 'DATA'} --settings {arguments.output}"
        )
    return 0


class _Tuning:
    """A tuning whose arguments have been checked."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        if arguments.data is None and not arguments.dry_run:
            raise MbcError("MBC315", "there are no data to tune with", "give --data, or --dry-run to plan alone")
        if arguments.output is not None:
            check_writable(Path(arguments.output))
        for place in filter(None, (arguments.data, arguments.test)):
            check_place(place)
        if arguments.target is not None and not arguments.dry_run:
            check_target(arguments)
        self._source = read_source(arguments.source)
        asked = replace(options(arguments), gpus=1, explains_gpu=True)  # its batches are for a GPU
        self._asked = asked if arguments.memory is None else with_budget(asked, arguments.memory)
        self._batch = own_batch(self._source, self._asked)
        lowered = lower(parse(self._source), asked.settings, asked.network)
        require_predicted_times(lowered.network.name, lowered.precision, "choosing a batch by speed")
        rule = lowered.optimizer
        check_updates(rule, "mbc tune")
        self._optimizer = rule
        self.base = Base(
            self._batch * rule.accumulate, rule.accumulate, arguments.lr, arguments.rule or USUAL_RULES[rule.kind],
            rule.momentum,
        )  # fmt: skip
        self.state = open_state(None if arguments.state is None else Path(arguments.state), self._key())
        self._data: Data | None = None

    def train(self, say: Say) -> Spending:
        """Run the training steps of the tuning, which find the rate and the noise scale of the base batch."""
        arguments, state, accumulate = self._arguments, self.state, self.base.accumulate
        ranges, measures = arguments.lr is None, arguments.noise_scale is None
        part = self._batch if accumulate > 1 else check_halves(self._batch)
        options = with_batch(self._asked, part)
        more = (("train.accumulate", str(max(2, accumulate))), ("train.noise_scale", "true"))
        plan = self._plan(replace(options, settings=(*options.settings, *more)), f"batch {self._batch}", say)
        self._data = open_data(arguments.data, inputs_of(plan.graph), "train")
        if arguments.target is not None:
            check_metric(arguments, plan.graph)
        rows = self._data.rows or arguments.rows
        if rows is None:
            raise MbcError(
                "MBC319", "the number of rows that a function yields in an epoch is unknown", "give --rows N"
            )
        spent = spending(rows, self.base.rows, arguments.epochs, arguments.most_share, ranges, measures)
        with ExitStack() as closing:

            def opened() -> Module:
                closing.close()  # a GPU may hold one of them only
                return closing.enter_context(self._open(plan))

            if ranges:
                say("range test")
                find_rate(opened, plan.graph, self._data, arguments.seed, state, spent.range_steps)
                assert state.range_test is not None
                self.base = replace(self.base, rate=state.range_test.chosen)
            closing.close()
            if measures:
                say("noise scale")
                assert self.base.rate is not None
                measure(opened, plan.graph, self._data, arguments.seed, state, spent.noise_steps, self.base.rate)
        return spent

    def table(self, say: Say, tell: Say) -> Table:
        """Plan all mini-batches on all numbers of GPUs."""
        tried: list[Tried] = []
        rows = self._rows
        most = MOST_BATCH if rows is None else rows // self.base.accumulate
        noise = self._arguments.noise_scale
        if noise is None and self.state.noise is not None:
            noise = self.state.noise.value

        def value_of(batch: int) -> float:
            return row_efficiency(noise, self.base, batch * self.base.accumulate)

        for gpus in gpu_counts(self._arguments.shared_by):
            on = f" on {gpus} GPUs" if gpus > 1 else ""
            asked = self._asked_on(gpus)

            def plan_at(batch: int, asked: Options = asked, on: str = on) -> Plan:
                return self._plan(with_batch(asked, batch), f"batch {batch}{on}", say)

            def report(probe: Probe, on: str = on) -> None:
                self.state.write()
                tell(batch_line(probe) + on)

            probes_so_far = self.state.probes.setdefault(gpus, {})
            probes = climb(plan_at, self._batch, gpus, max(gpus, most), value_of, probes_so_far, report)
            tried += [Tried(gpus, probe) for probe in probes]
        return table(tried, self.base, noise)

    def epochs(self, result: Table) -> int:
        """Return the number of epochs that the tuned training needs to reach the target."""
        row = result.taken
        assert row.rate is not None
        with busy(f"planning batch {row.batch} once more") as say:
            asked = self._asked_on(row.gpus)
            asked = replace(asked, settings=(*asked.settings, *self._settings_of(row)))
            plan = self._plan(asked, f"batch {row.batch}", say)
        return epochs_to_target(self._arguments, plan, row.rate, self._warm_up, self._subject)

    def write(self, result: Table, epochs: int | None) -> None:
        """Write the settings of the chosen row.

        Its epochs are those to the target, or those with the progress of the requested epochs at the base batch.
        """
        arguments, row = self._arguments, result.taken
        targeted = epochs is not None
        settings = [("set", "=".join(setting)) for setting in (*self._asked.all_settings, *self._settings_of(row))]
        settings += [("gpus", str(row.gpus))] if row.gpus > 1 else []
        settings += [] if row.rate is None else [("lr", f"{row.rate:.6g}")]
        settings += [
            ("epochs", str(epochs or self.equivalent_epochs(result))),
            ("schedule", SCHEDULE if targeted else "cosine"),
        ]
        settings += [("warmup", f"{self._warm_up:g}"), ("seed", str(arguments.seed))]
        text = settings_text(settings, f"mbc tune {arguments.source}: what mbc train --settings takes")
        replace_file(Path(arguments.output), [text.encode()])

    def equivalent_epochs(self, result: Table) -> int:
        """Return the epochs of the tuned training that make the progress of the requested epochs at the base batch."""
        return result.taken.epochs(self._arguments.epochs, self.base, self._rows)

    def _settings_of(self, row: Row) -> tuple[tuple[str, str], ...]:
        """Return the settings of the source with which a row is trained: its batch, and its momentum if it differs."""
        batch, rule = ("batch", str(row.batch)), self._optimizer
        if row.momentum is None or row.momentum == rule.momentum:
            return (batch,)
        momentum = float(f"{row.momentum:.6g}")
        changed = replace(rule, momentum=momentum, nesterov=rule.nesterov and momentum > 0)
        return batch, ("train.optimizer", optimizer_text(changed))

    @property
    def _rows(self) -> int | None:
        """Rows of an epoch; None without data."""
        return None if self._data is None else self._data.rows or self._arguments.rows

    @property
    def _warm_up(self) -> float:
        """Duration of the warm-up in epochs."""
        return WARM_UP_SHARE * self._arguments.epochs

    def _plan(self, asked: Options, which: str, say: Say) -> Plan:
        from mbc.compiler import try_plan
        from mbc.stages import Stages

        return try_plan(self._source, asked, Stages(announce=lambda stage: say(f"{which}: {stage}")))

    def _asked_on(self, gpus: int) -> Options:
        return replace(self._asked, gpus=gpus, gpus_per_node=min(gpus, self._arguments.shared_by))

    def _subject(self, plan: Plan) -> Plan | Path:
        """Return the package of a plan where a GPU could use it, else the plan; a module is opened from it."""
        if not builds_package(self._arguments.device, None):
            return plan
        from mbc.cli.subject import up_to_date

        return up_to_date((plan,), f"{plan.graph.name}.tuning")

    def _open(self, plan: Plan) -> Module:
        from mbc.runtime.module import Module

        return Module(self._subject(plan), seed=self._arguments.seed, device=self._arguments.device)

    def _key(self) -> dict[str, str]:
        arguments = self._arguments
        return {
            "source": hashlib.sha256(self._source.text.encode()).hexdigest()[:16],
            "planning": self._asked.digest,
            "--data": str(arguments.data),
            "--seed": str(arguments.seed),
            "--epochs": str(arguments.epochs),
            "--most-share": str(arguments.most_share),
            "--lr": str(arguments.lr),
            "--noise-scale": str(arguments.noise_scale),
        }
