"""Searches within budgets: the largest mini-batch that fits, and the time of a step as the budget shrinks.

Both plan repeatedly; every probe is a whole plan, or the reason why there is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from mbc.errors import BudgetError, MbcError
from mbc.frontend.lower import choose_network, lower
from mbc.frontend.parse import parse
from mbc.optimize.schedule.step_time import step_us
from mbc.options import UNLIMITED_BYTES, Options
from mbc.plan.model import Plan
from mbc.source import Source
from mbc.units import show_enough, show_size

NOTHING_FITS = "MBC194"  # the code of the error for a smallest batch without a plan
BATCH = "batch"  # the parameter of a network that counts the rows of its inputs
MOST_BATCH = 1 << 20
MOST_GUESSES = 2
STRIDE = 8  # a guess is nearly right or far off: doubled steps would take as many tries as the bisection after them
LOWEST_SHARE = 64  # the curve over batches goes down to the largest batch divided by this number
MOST_BETWEEN = 6  # tries for a faster batch between two that fit
LEAST_GAIN = 1.05  # a batch is tried if it may have images/s higher by this factor
LEAST_STEP = 1.125  # batches with a smaller ratio have nearly equal images/s

PlanAt = Callable[[int], Plan]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a plan.

    `needed_bytes` is arena and overhead; `floor_bytes` is the lower bound of all plans, with overhead. `train_us` is
    the time of a run of the training program. `least_us` is the lower bound of plans whose kernels take the times of
    this plan's kernels, run concurrently or serially. `images_per_s` counts all mini-batches of a step that accumulates
    gradients. `train_low_us` and `train_high_us` are the ends of the prediction interval of `train_us`.
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


def figures(plan: Plan) -> Figures:
    """Return the figures of a plan."""
    p, whole_us = plan.predictions, step_us(plan)
    return Figures(
        plan.graph.global_batch,
        plan.budget_bytes,
        p.arena_bytes + p.overhead_bytes,
        p.arena_bytes,
        p.host_bytes,
        plan.bounds.floor_bytes + p.overhead_bytes,
        p.train_us,
        plan.bounds.least_us,
        p.measured_share,
        plan.graph.optimizer.accumulate * plan.graph.global_batch * 1e6 / whole_us if whole_us else 0.0,
        p.peer_bytes,
        p.train_low_us,
        p.train_high_us,
    )


def _most_images_per_s(f: Figures) -> float:
    """Return the images/s of a batch whose step takes no longer than its lower bound."""
    return f.images_per_s * f.train_us / f.least_us if f.least_us else f.images_per_s


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
class BatchFit:
    """Result of a search over batches.

    `probes` are in order of the batch. `largest` is the largest batch that fits, `fastest` the batch with most
    images/s. `finished` is true if the search has ended; otherwise larger batches may fit.
    """

    probes: tuple[Probe, ...]
    largest: Figures
    fastest: Figures
    finished: bool = True

    @property
    def at_least(self) -> bool:
        """True if the search ended at MOST_BATCH, without a batch that does not fit."""
        return self.finished and self.probes[-1].figures is not None


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
    """Plans by their batch or their budget, each of which is planned once. `tell` receives each new probe."""

    plan_at: PlanAt
    probes: dict[int, Probe]
    tell: Tell = _ignore

    def probe(self, at: int) -> Probe:
        """Return the probe at a batch or a budget.

        Raises:
            MbcError: An error that occurs at any batch and any budget.
        """
        if at not in self.probes:
            try:
                self.probes[at] = Probe(at, figures(self.plan_at(at)))
            except MbcError as error:
                if not _is_of_search(error):
                    raise
                self.probes[at] = Probe(at, None, error)
            self.tell(self.probes[at])
        return self.probes[at]


def largest_batch(plan_at: PlanAt, start: int = 1, multiple: int = 1, tell: Tell = _ignore, least: int = 0) -> BatchFit:
    """Search the largest multiple of `multiple` rows that has a plan.

    The search doubles from about `start`, then searches between the largest batch that fits and the smallest batch that
    does not fit. The memory of the smallest plan gives a first guess. Powers of two between the largest batch and a
    part of it (LOWEST_SHARE) are planned as well, as points of the curve of images/s, and batches between these if lack
    of memory slows one of their neighbours. Ctrl-C ends the search with its results so far, if a batch fits.

    Args:
        plan_at: Plans with a batch.
        start: Number of rows at which to begin.
        multiple: Batches are multiples of this number.
        tell: Receives each new probe.
        least: Fewer rows are not tried, because no plan has them.

    Raises:
        MbcError: MBC194, not even the smallest batch fits; or an error that occurs at any batch.
    """
    search = Search(plan_at, {}, tell)
    finished = True
    try:
        _seek(search, start, multiple, least)
        _seek_fastest(search, multiple)
    except KeyboardInterrupt:
        finished = False
    planned = [probe.figures for probe in search.probes.values() if probe.figures is not None]
    if not planned:
        raise KeyboardInterrupt
    return BatchFit(
        tuple(search.probes[at] for at in sorted(search.probes)),
        max(planned, key=lambda f: f.batch),
        max(planned, key=lambda f: (f.images_per_s, f.batch)),
        finished,
    )


def _seek(search: Search, start: int, multiple: int, least: int) -> None:
    first = min(max(1, -(-least // multiple)), max(1, MOST_BATCH // multiple))
    low = largest_count(search, start, multiple, first)
    count = 1
    while count < low:
        if count >= first and count * LOWEST_SHARE >= low:
            search.probe(count * multiple)
        count *= 2


def largest_count(search: Search, start: int, multiple: int = 1, first: int = 1, most: int = MOST_BATCH) -> int:
    """Return the largest count whose multiple has a plan, from `first` on.

    Args:
        search: Plans by multiples.
        start: Multiple at which to begin.
        multiple: Only multiples of this number are tried.
        first: Least count.
        most: Largest multiple.

    Raises:
        MbcError: MBC194, not even `first` fits.
    """

    def fits(count: int) -> bool:
        return search.probe(count * multiple).figures is not None

    most = max(1, most // multiple)
    low = min(max(first, start // multiple), most)
    high = None
    while not fits(low):
        if low == first:
            raise nothing_fits(search.probe(low * multiple), low * multiple)
        refusal = search.probe(low * multiple).refusal
        hopeless = isinstance(refusal, BudgetError) and refusal.at_any_batch
        low, high = first if hopeless else max(first, low // 2), low
    while high is None and low < most:
        further = min(2 * low, most)
        low, high = (further, None) if fits(further) else (low, further)
    if high is not None:
        lowest = low

        def guess(count: int) -> int:
            return _guess(search, lowest * multiple, count * multiple) // multiple

        low = _between(fits, guess, low, high)
    return low


def _seek_fastest(search: Search, multiple: int) -> None:
    """Try batches between two that fit, where the lower bounds of their steps leave room for more images/s.

    Memory that gets short slows steps by more than rows are added, so that the fastest batch may be between any two.
    """
    for _ in range(MOST_BETWEEN):
        planned = [f for f in (search.probes[at].figures for at in sorted(search.probes)) if f is not None]
        most = LEAST_GAIN * max(f.images_per_s for f in planned)
        gaps = [
            (max(_most_images_per_s(low), _most_images_per_s(high)), low.batch, high.batch)
            for low, high in itertools.pairwise(planned)
            if high.batch > LEAST_STEP * low.batch
        ]
        tried = [((low + high) // 2 // multiple * multiple, most_here) for most_here, low, high in gaps]
        tried = [(at, most_here) for at, most_here in tried if most_here > most and at not in search.probes]
        if not tried:
            return
        search.probe(max(tried, key=lambda one: one[1])[0])


def _between(fits: Callable[[int], bool], guess: Callable[[int], int], low: int, high: int) -> int:
    """Return the largest count that fits, if `low` fits and `high` does not.

    Planning one count can take minutes, so the first count to try is `guess(high)`. After a guess that fits, steps grow
    by the factor STRIDE. After MOST_GUESSES that do not fit, the rest is bisected.
    """
    guesses, step = MOST_GUESSES, 0
    while high - low > 1:
        at = (low + high) // 2
        guessing = not step and guesses > 0
        if step:
            at = min(low + step, at)
        elif guessing:
            at = min(max(guess(high), low + 1), high - 1)
        if fits(at):
            low, step, guesses = at, 1 if guessing else STRIDE * step, 0
        else:
            high, step, guesses = at, 0, guesses - guessing
    return low


def _guess(search: Search, fitting: int, refused: int) -> int:
    """Return the batch that may just fit, if the arena of the smallest plan for `refused` is proportional to the rows.

    If there is no such plan, it is half-way.
    """
    here, refusal = search.probe(fitting).figures, search.probe(refused).refusal
    assert here is not None
    if not isinstance(refusal, BudgetError):
        return (fitting + refused) // 2
    overhead_bytes = here.needed_bytes - here.arena_bytes
    return refused * (here.budget_bytes - overhead_bytes) // max(1, refusal.needed_bytes - overhead_bytes)


def budget_curve(plan_at: PlanAt, points: int, tell: Tell = _ignore) -> BudgetCurve:
    """Plan at `points` (two or more) budgets, evenly from the floor to the size of the unlimited plan, largest first.

    Ctrl-C ends it with its results so far, if the plan without a limit is among them.
    """
    search = Search(plan_at, {}, tell)
    unlimited = figures(plan_at(UNLIMITED_BYTES))
    least, most = unlimited.floor_bytes, unlimited.needed_bytes
    finished = True
    try:
        for i in reversed(range(points)):
            search.probe(least + (most - least) * i // (points - 1))
    except KeyboardInterrupt:
        finished = False
    return BudgetCurve(tuple(search.probes[at] for at in sorted(search.probes)), unlimited, finished)


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
    return lower(program, options.settings, options.network).network.batch


def with_batch(options: Options, batch: int) -> Options:
    """Return `options` with another batch."""
    return _set(options, BATCH, str(batch))


def with_budget(options: Options, budget_bytes: int) -> Options:
    """Return `options` with another budget."""
    return _set(options, "memory.device", f"{budget_bytes} B")


def _set(options: Options, name: str, value: str) -> Options:
    kept = tuple(setting for setting in options.settings if setting[0] != name)
    return replace(options, settings=(*kept, (name, value)))


def _is_of_search(error: MbcError) -> bool:
    # Codes of the search mean that no plan was found; a smaller batch may have one.
    return isinstance(error, BudgetError) or error.code.startswith("MBC2")


def nothing_fits(probe: Probe, batch: int) -> MbcError:
    """Return the error for a smallest batch without a plan: MBC194, or its own error if that is not a BudgetError."""
    refusal = probe.refusal
    assert refusal is not None
    if not isinstance(refusal, BudgetError):
        return refusal
    enough = f"to at least {show_enough(refusal.floor_bytes)}: most plans take more"
    if refusal.needed_bytes > refusal.floor_bytes:
        enough = (
            f"to {show_enough(refusal.needed_bytes)}, which the smallest plan that was found needs; the lower bound "
            f"of all plans is {show_size(refusal.floor_bytes)}"
        )
    return MbcError(
        NOTHING_FITS,
        f"nothing fits, not even a batch of {batch}: {refusal.message}",
        f"raise --memory {enough}",
        refusal.span,
    )
