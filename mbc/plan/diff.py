"""The differences between two plans: of two files, or of one source compiled twice."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.hardware.streams import COPY_STREAMS
from mbc.ir.text import optimizer_summary
from mbc.plan.collectives import Sharing, sharing_of
from mbc.plan.model import Plan
from mbc.plan.summary import OperationSummary, summarise
from mbc.plan.traffic import direction_bytes

Figure = str | int | float


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of the whole plan in both plans; the name ends in its unit (`arena_bytes`, `train_us`)."""

    name: str
    before: Figure
    after: Figure


@dataclass(frozen=True, slots=True)
class OperationChange:
    """One operation that the two plans run differently.

    Attributes:
        program: "train" or "infer".
        name: Name of the operation or group.
        kind: Kind of the operation in the first plan.
        differs: What differs: kind, kernel, micro_batches, layout, workspace, time.
        before: The operation in the first plan.
        after: The operation in the second plan.
    """

    program: str  # train | infer
    name: str
    kind: str
    differs: tuple[str, ...]
    before: OperationSummary
    after: OperationSummary

    @property
    def only_time(self) -> bool:
        """True if only the time differs, as it does for every operation when the plans are for different GPUs."""
        return self.differs == ("time",)


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The differences between two plans.

    Attributes:
        totals: Figures of the whole plan that differ.
        operations: Operations that both plans run, but differently.
        only_before: Operations and conversions that only the first plan runs, as (program, summary).
        only_after: Operations and conversions that only the second plan runs, as (program, summary).
        plans: The two plans.
    """

    totals: tuple[Change, ...]
    operations: tuple[OperationChange, ...]
    only_before: tuple[tuple[str, OperationSummary], ...]
    only_after: tuple[tuple[str, OperationSummary], ...]
    plans: tuple[Plan, Plan]

    @property
    def same(self) -> bool:
        """True if the plans do not differ."""
        return not (self.totals or self.operations or self.only_before or self.only_after)


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """Return the differences of two plans.

    Total figures are compared first, then the operations of both programs by name, in the order of `before`.
    """
    changes: list[OperationChange] = []
    gone: list[tuple[str, OperationSummary]] = []
    new: list[tuple[str, OperationSummary]] = []
    for title, old_program, new_program in (("train", before.train, after.train), ("infer", before.infer, after.infer)):
        old = {summary.name: summary for summary in summarise(before, old_program)}
        now = {summary.name: summary for summary in summarise(after, new_program)}
        gone += [(title, summary) for name, summary in old.items() if name not in now]
        new += [(title, summary) for name, summary in now.items() if name not in old]
        for name in old:
            if name in now:
                differs = _differences(old[name], now[name])
                if differs:
                    changes.append(OperationChange(title, name, old[name].kind, differs, old[name], now[name]))
    figures = zip(_figures(before), _figures(after), strict=True)
    totals = tuple(Change(name, a, b) for (name, a), (_, b) in figures if a != b)
    return PlanDiff(totals, tuple(changes), tuple(gone), tuple(new), (before, after))


def _differences(old: OperationSummary, now: OperationSummary) -> tuple[str, ...]:
    compared = (
        ("kind", old.kind, now.kind),
        ("kernel", old.kernels, now.kernels),
        ("micro_batches", old.micro_batches, now.micro_batches),
        ("layout", old.layouts, now.layouts),
        ("workspace", old.workspace_bytes, now.workspace_bytes),
        ("time", (old.time_us, old.estimated), (now.time_us, now.estimated)),
    )
    return tuple(name for name, a, b in compared if a != b)


def _shared(plan: Plan) -> tuple[tuple[str, Figure], ...]:
    sharing = sharing_of(plan) or Sharing((plan.graph.batch,), (0,), 0, ())
    return (
        ("gpus", len(sharing.rows)),
        ("rows", ", ".join(map(str, sharing.rows))),
        ("buckets", len(sharing.buckets)),
        ("all_reduce_bytes", sharing.size_bytes),
        ("all_reduce_us", sharing.time_us),
        ("thread_blocks", sharing.ctas),
        ("sharded_state_bytes", sharing.state_bytes),
    )


def _figures(plan: Plan) -> tuple[tuple[str, Figure], ...]:
    """Return all figures of a whole plan by name, always in the same order."""
    graph, target, predictions = plan.graph, plan.target, plan.predictions
    return (
        ("network", graph.name),
        ("settings", plan.settings_text),
        ("batch", graph.global_batch),
        ("precision", str(graph.precision)),
        ("optimizer", optimizer_summary(graph.optimizer)),
        ("mbc", plan.version),
        ("gpu", target.gpu),
        ("architecture", target.architecture),
        ("multiprocessors", target.multiprocessors),
        ("memory_bytes", target.memory_bytes),
        ("cudnn", target.cudnn),
        ("profile", target.profile),
        ("budget_bytes", plan.budget_bytes),
        ("host_limit_bytes", plan.host_limit_bytes or "none"),
        ("peer_limit_bytes", plan.peer_limit_bytes),
        ("train_us", predictions.train_us),
        ("train_low_us", predictions.train_low_us),
        ("train_high_us", predictions.train_high_us),
        ("infer_us", predictions.infer_us),
        ("infer_low_us", predictions.infer_low_us),
        ("infer_high_us", predictions.infer_high_us),
        ("measured_share", predictions.measured_share),
        ("arena_bytes", predictions.arena_bytes),
        ("overhead_bytes", predictions.overhead_bytes),
        ("host_bytes", predictions.host_bytes),
        ("peer_bytes", predictions.peer_bytes),
        *((f"copied_{stream}_bytes", direction_bytes(plan, plan.train, stream)) for stream in COPY_STREAMS),
        ("live_bytes", plan.bounds.live_bytes),
        ("floor_bytes", plan.bounds.floor_bytes),
        ("fastest_us", plan.bounds.fastest_us),
        ("least_us", plan.bounds.least_us),
        ("train_launches", len(plan.train.launches)),
        ("infer_launches", len(plan.infer.launches)),
        ("waits", len(plan.train.waits) + len(plan.infer.waits)),
        ("buffers", len(plan.buffers)),
        *_shared(plan),
    )
