"""Searches within budgets: the largest mini-batch that fits, and the time of a step as the budget shrinks.

Both plan repeatedly; every probe is a whole plan, or the reason why there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mbc.errors import BudgetError, MbcError
from mbc.frontend.lower import choose_network, lower
from mbc.frontend.parse import parse
from mbc.optimize.schedule.step_time import samples_per_s
from mbc.options import BATCH, UNLIMITED_BYTES, Options
from mbc.plan.model import Plan
from mbc.plan.techniques import saves_memory
from mbc.source import Source
from mbc.units import show_enough, show_size

NOTHING_FITS = "MBC194"  # the code of the error for a smallest batch without a plan
MOST_BATCH = 1 << 20
LEAST_STEP = 1.125  # batches with a smaller ratio have nearly equal images/s, so that both are seldom worth a plan
LOWEST_SHARE = 8  # the curve over batches goes down to the largest batch divided by this number
# Largest ratio of the most images/s so far to those of a step that is still searched for. Below that, accumulating the
# gradients of faster mini-batches trains on the same number of rows in less time.
MOST_SLOWDOWN = 2.0
MOST_MISSES = 2  # after as many wrong predictions, a search halves its bracket
GUESS_MARGIN = 8  # a try stays this part of a bracket away from its ends: a right prediction divides the bracket by 8

PlanAt = Callable[[int], Plan]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a plan.

    `needed_bytes` is arena and overhead; `floor_bytes` is the lower bound of all plans, with overhead. `train_us` is
    the time of a run of the training program. `least_us` is the lower bound of plans whose kernels take the times of
    this plan's kernels, run concurrently or serially. `images_per_s` counts all mini-batches of a step that accumulates
    gradients. `train_low_us` and `train_high_us` are the ends of the prediction interval of `train_us`. `saves_memory`
    is true if the step spends time to save memory.
    """

    batch: int
    budget_bytes: int
    needed_bytes: int
    arena_bytes: int
    host_bytes: int
    floor_bytes: int
    train_us: float
    least_us: float
    measured_share: float
    images_per_s: float
    peer_bytes: int = 0
    train_low_us: float = 0.0
    train_high_us: float = 0.0
    saves_memory: bool = False


def figures(plan: Plan) -> Figures:
    """Return the figures of a plan."""
    p = plan.predictions
    return Figures(
        plan.graph.global_batch, plan.budget_bytes, p.arena_bytes + p.overhead_bytes, p.arena_bytes, p.host_bytes,
        plan.bounds.floor_bytes + p.overhead_bytes, p.train_us, plan.bounds.least_us, p.measured_share,
        samples_per_s(plan), p.peer_bytes, p.train_low_us, p.train_high_us, saves_memory(plan),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe:
    """One attempt with a batch or a budget: the figures of its plan, or the error that explains why there is none."""

    at: int
    figures: Figures | None
    refusal: MbcError | None = None


Tell = Callable[[Probe], None]


def _ignore(_: Probe) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches that a search may try.

    Attributes:
        start: Rows at which the search begins.
        multiple: All batches are multiples of this number of rows.
        least: Smaller batches are not tried, because no plan has them.
        most: Larger batches are not tried.
        ratio: The search ends when the smallest batch that does not fit has at most this many times the rows of the
            largest that fits, or is predicted to. At 1 it ends when nothing is between the two.
    """

    start: int = 1
    multiple: int = 1
    least: int = 0
    most: int = MOST_BATCH
    ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class BatchFit:
    """Result of a search over batches.

    `probes` are in order of the batch. `largest` is the largest batch that fits, `fastest` the batch with most
    images/s. `finished` is true if the search has ended; otherwise larger batches may fit. `multiple`: batches are
    multiples of this number.
    """

    probes: tuple[Probe, ...]
    largest: Figures
    fastest: Figures
    finished: bool = True
    multiple: int = 1

    @property
    def at_least(self) -> bool:
        """True if the search ended at MOST_BATCH, without a batch that does not fit."""
        return self.finished and self.refused is None

    @property
    def refused(self) -> int | None:
        """The smallest batch above the largest one that does not fit; None if no such batch was tried."""
        return next((probe.at for probe in self.probes if probe.at > self.largest.batch), None)

    @property
    def untried(self) -> bool:
        """True if there are batches between the largest that fits and the smallest that does not."""
        return self.refused is not None and self.refused > self.largest.batch + self.multiple


@dataclass(frozen=True, slots=True)
class BudgetCurve:
    """Result of a search over budgets.

    `probes` are in order of the budget, from the floor to the size of the plan without a limit (`unlimited`).
    `finished`: all budgets were tried.
    """

    probes: tuple[Probe, ...]
    unlimited: Figures
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Search:
    """Plans by their batch or their budget, each of which is planned once.

    Attributes:
        plan_at: Plans with a batch or a budget.
        probes: The probes so far.
        tell: Receives each new probe.
        of_budgets: Whether the probes differ in their budget only. Then no refusal names a larger plan than the
            smallest one above its budget that any probe has found so far.
    """

    plan_at: PlanAt
    probes: dict[int, Probe]
    tell: Tell = _ignore
    of_budgets: bool = False

    def probe(self, at: int, refusal: MbcError | None = None) -> Probe:
        """Return the probe at a batch or a budget; with a `refusal`, that is its reason and nothing is planned.

        Raises:
            MbcError: An error that occurs at any batch and any budget.
        """
        if at not in self.probes:
            try:
                self.probes[at] = Probe(at, None if refusal else figures(self.plan_at(at)), refusal)
            except MbcError as error:
                if not _is_of_search(error):
                    raise
                self.probes[at] = Probe(at, None, error)
            self.tell(self._with_smallest(self.probes[at]))
        return self._with_smallest(self.probes[at])

    def all_probes(self) -> tuple[Probe, ...]:
        """Return the probes so far, in the order of the batch or the budget."""
        return tuple(self._with_smallest(probe) for _, probe in sorted(self.probes.items()))

    def _with_smallest(self, probe: Probe) -> Probe:
        """Return the probe; a refusal of a budget then names the smallest plan above that budget of all probes."""
        refusal = probe.refusal
        if not self.of_budgets or not isinstance(refusal, BudgetError):
            return probe
        results = [other.figures or other.refusal for other in self.probes.values()]
        plans = (p for p in results if isinstance(p, Figures) or (isinstance(p, BudgetError) and p.is_planned))
        # A size within the budget is no remedy: a search that tries it next would stay where it is.
        size_bytes = min((p.needed_bytes for p in plans if p.needed_bytes > probe.at), default=UNLIMITED_BYTES)
        if not refusal.floor_bytes < size_bytes < refusal.needed_bytes:
            return probe
        message = f"the smallest plan found takes {show_size(size_bytes)}"
        # Each budget is a new search, so that a budget of that size may be refused.
        return replace(probe, refusal=replace(refusal, message=message, needed_bytes=size_bytes, is_certain=False))

    @property
    def planned(self) -> list[Figures]:
        """The figures of all plans so far, in the order of the batch or the budget."""
        return [f for _, probe in sorted(self.probes.items()) if (f := probe.figures) is not None]


def largest_batch(plan_at: PlanAt, batches: Batches, tell: Tell = _ignore) -> BatchFit:
    """Search the largest batch that has a plan, and the batch with most images/s.

    The rows of half, a quarter and an eighth of the largest batch show the curve of images/s. The batch at which a step
    without any saving of memory just fits is planned as well, because larger batches spend time to save memory. Ctrl-C
    ends the search with its results so far, if a batch fits.

    Args:
        plan_at: Plans with a batch.
        batches: The batches to try.
        tell: Receives each new probe.

    Raises:
        MbcError: MBC194, not even the smallest batch fits; or an error that occurs at any batch.
    """
    search = Search(plan_at, {}, tell)
    finished = True
    try:
        _seek_curve(search, batches, largest_count(search, batches) * batches.multiple)
        _seek_fastest(search, batches)
    except KeyboardInterrupt:
        finished = False
        if not search.planned:
            raise
    return BatchFit(
        search.all_probes(),
        max(search.planned, key=lambda f: f.batch),
        max(search.planned, key=lambda f: (f.images_per_s, f.batch)),
        finished,
        batches.multiple,
    )


def largest_count(search: Search, batches: Batches) -> int:
    """Return the largest count whose multiple has a plan: the counts of `Search` are multiples of a number of rows.

    The search doubles or halves from the start until one batch fits and one does not. Each further batch lies between
    these two, so that the search ends, even if a batch fits that is larger than one that does not.

    Args:
        search: Plans by batches.
        batches: The batches to try.

    Raises:
        MbcError: MBC194, not even the smallest batch fits.
    """
    multiple = batches.multiple
    most = max(1, batches.most // multiple)
    first = min(max(1, -(-batches.least // multiple)), most)

    def fits(count: int) -> bool:
        return search.probe(count * multiple).figures is not None

    low, high = min(max(first, batches.start // multiple), most), None
    while not fits(low):
        refusal = search.probe(low * multiple).refusal
        if low == first:
            raise nothing_fits(search.probe(low * multiple), low * multiple)
        hopeless = isinstance(refusal, BudgetError) and refusal.at_any_batch
        low, high = first if hopeless else max(first, low // 2), low
    while high is None and low < most:
        further = min(2 * low, most)
        low, high = (further, None) if fits(further) else (low, further)
    misses = 0
    while high is not None and high > low + 1 and high > batches.ratio * low:
        at, predicted = (low + high) // 2, None
        if misses < MOST_MISSES and (rows := _predict(search, low * multiple, high * multiple)) is not None:
            predicted, margin = rows // multiple, max(1, (high - low) // GUESS_MARGIN)
            if batches.ratio > 1.0 and predicted <= batches.ratio * low:
                break
            at = min(max(predicted, low + margin), high - margin)
        if fits(at):
            low = at
        else:
            high = at
        misses += predicted is not None and (low == at) != (at <= predicted)
    return low


def _predict(search: Search, fitting: int, refused: int) -> int | None:
    """Return the largest batch that is likely to fit, above one that fits and below one that does not.

    The memory of the smallest plans is nearly affine in the batch. Two lines end at the smallest plan for the batch
    that does not fit: one begins at the plan for the batch that fits, one at the overhead for a batch without rows. The
    result is the larger of the two batches at which these lines reach the budget; None if the refusal does not say how
    much memory the smallest plan takes.
    """
    here, refusal = search.probe(fitting).figures, search.probe(refused).refusal
    assert here is not None
    if not isinstance(refusal, BudgetError) or not refusal.is_planned or refusal.needed_bytes <= here.budget_bytes:
        return None
    end = (refused, refusal.needed_bytes)
    starts = (fitting, here.needed_bytes), (0, here.needed_bytes - here.arena_bytes)
    return max(_reaches(start, end, here.budget_bytes) for start in starts)


def _reaches(one: tuple[int, int], other: tuple[int, int], size_bytes: int) -> int:
    """Return the batch at which the line through two points (batch, bytes) reaches a size."""
    (batch, at_bytes), (further, further_bytes) = one, other
    return batch + (further - batch) * (size_bytes - at_bytes) // max(1, further_bytes - at_bytes)


def _seek_curve(search: Search, batches: Batches, largest: int) -> None:
    """Plan smaller batches, each half of the next one, down to a part of the largest (LOWEST_SHARE)."""
    at = min(f.batch for f in search.planned)
    while (at := at // 2 // batches.multiple * batches.multiple) >= max(1, batches.least, -(-largest // LOWEST_SHARE)):
        search.probe(at)


def _seek_fastest(search: Search, batches: Batches) -> None:
    """Plan the largest batch whose step need not save memory, unless one slightly smaller is planned.

    The memory of such a step is nearly affine in the batch, as two of them show.
    """
    whole = [(f.batch, f.needed_bytes) for f in search.planned if not f.saves_memory]
    if not whole:
        return
    here = search.planned[0]
    *_, one, other = (0, here.needed_bytes - here.arena_bytes), *whole
    at = _reaches(one, other, here.budget_bytes) // batches.multiple * batches.multiple
    rows = [f.batch for f in search.planned]
    if rows[0] < at < rows[-1] and not any(row <= at <= LEAST_STEP * row for row in rows):
        search.probe(at)


def budget_curve(plan_at: PlanAt, points: int, tell: Tell = _ignore) -> BudgetCurve:
    """Plan at `points` (two or more) budgets, evenly from the floor to the size of the unlimited plan, largest first.

    A budget below one that is too small (BudgetError) is refused for the same reason, without a search. After any other
    refusal, such as too little host memory, the next budget is planned. Ctrl-C ends the curve with its results so far,
    if the plan without a limit is among them.
    """
    search = Search(plan_at, {}, tell, of_budgets=True)
    unlimited = figures(plan_at(UNLIMITED_BYTES))
    least, most = unlimited.floor_bytes, unlimited.needed_bytes
    finished, refusal = True, None
    try:
        for i in reversed(range(points)):
            reason = search.probe(least + (most - least) * i // (points - 1), refusal).refusal
            refusal = reason if isinstance(reason, BudgetError) else None
    except KeyboardInterrupt:
        finished = False
    return BudgetCurve(search.all_probes(), unlimited, finished)


def own_batch(source: Source, options: Options) -> int:
    """Return the batch of the network with its settings in `options`.

    Raises:
        MbcError: MBC195, the network has no parameter for its batch.
    """
    program = parse(source)
    chosen = choose_network(program, options.network)
    if BATCH not in (parameter.name for parameter in chosen.parameters):
        raise MbcError(
            "MBC195",
            f"`{chosen.name}` has no parameter `{BATCH}`, so no other batch can be tried",
            f"write `network {chosen.name}({BATCH} = 64, …)` and `input NAME[{BATCH}, …]`",
            chosen.span,
        )
    return lower(program, options.settings, options.network, options.overrides).network.batch


def with_batch(options: Options, batch: int, most_images_per_s: float = 0.0) -> Options:
    """Return `options` with another batch.

    Args:
        options: The options.
        batch: Rows of a mini-batch.
        most_images_per_s: The most images/s of the batches so far. The search abandons steps that make fewer images/s
            than this number divided by MOST_SLOWDOWN; 0 sets no limit.
    """
    slowest_us = MOST_SLOWDOWN * batch * 1e6 / most_images_per_s if most_images_per_s else math.inf
    return replace(options, overrides=replace(options.overrides, batch=batch), slowest_us=slowest_us)


def with_budget(options: Options, budget_bytes: int) -> Options:
    """Return `options` with another budget."""
    return replace(options, overrides=replace(options.overrides, device_bytes=budget_bytes))


def _is_of_search(error: MbcError) -> bool:
    # Codes of the search mean that no plan was found; a smaller batch may have one.
    return isinstance(error, BudgetError) or error.code.startswith("MBC2")


def nothing_fits(probe: Probe, batch: int) -> MbcError:
    """Return the error for a smallest batch without a plan: MBC194, or its own error if that is not a BudgetError."""
    refusal = probe.refusal
    assert refusal is not None
    if not isinstance(refusal, BudgetError):
        return refusal
    enough = f"above {show_enough(refusal.floor_bytes)}, a lower bound: most plans take more"
    if refusal.is_planned:
        enough = (
            f"to {show_enough(refusal.needed_bytes)}, which the smallest plan that was found needs; the lower bound "
            f"of all plans is {show_size(refusal.floor_bytes)}"
        )
    half_precision = f"give --set train.precision={refusal.half_precision}, or " if refusal.half_precision else ""
    return MbcError(
        NOTHING_FITS,
        f"nothing fits, not even a batch of {batch}: {refusal.message}",
        f"{half_precision}raise --memory {enough}",
        refusal.span,
    )
