"""What fits a budget: the largest mini-batch within it, and the time a step takes as the budget shrinks.

Both plan again and again; every probe is a whole plan, or the reason why there is none.
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

BATCH = "batch"  # the parameter of a network that counts the rows of its inputs
MOST_BATCH = 1 << 20
MOST_GUESSES = 2
STRIDE = 8  # a guess is nearly right or far off: doubled steps would take as many tries as bisection, before it begins
LOWEST_SHARE = 64  # the curve over batches goes down to this part of the largest
MOST_BETWEEN = 6  # tries for a faster batch between two that fit
LEAST_GAIN = 1.05  # of images/s that is worth a try
LEAST_STEP = 1.125  # batches of a smaller ratio make nearly as many images/s

PlanAt = Callable[[int], Plan]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a plan. `needed_bytes` is arena + overhead; `floor_bytes` the lower bound of all plans, overhead
    included; `train_us` a run of the training program, `least_us` the lower bound of plans whose kernels run as this
    one's do, concurrently or serially; `images_per_s` counts all mini-batches of a step that accumulates gradients."""

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


def figures(plan: Plan) -> Figures:
    """The figures of a plan."""
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
    )


def _most_images_per_s(f: Figures) -> float:
    """Return the images/s of a batch whose step takes no longer than its lower bound."""
    return f.images_per_s * f.train_us / f.least_us if f.least_us else f.images_per_s


@dataclass(frozen=True, slots=True)
class Probe:
    """One try, at a batch or a budget: its figures, or the error that says why there is no plan."""

    at: int
    figures: Figures | None
    refusal: MbcError | None = None


Tell = Callable[[Probe], None]


def _untold(_: Probe) -> None:
    pass


@dataclass(frozen=True, slots=True)
class BatchFit:
    """`probes` by batch. `largest` is the largest batch that was found to fit, `fastest` that with most images/s.
    `finished`: whether the search has ended, else larger ones may fit. `at_least`: it ended by MOST_BATCH, without a
    batch that does not fit."""

    probes: tuple[Probe, ...]
    largest: Figures
    fastest: Figures
    finished: bool = True

    @property
    def at_least(self) -> bool:
        return self.finished and self.probes[-1].figures is not None


@dataclass(frozen=True, slots=True)
class BudgetCurve:
    """`probes` by budget, from the floor to what the plan without a limit takes (`unlimited`). `finished`: whether all
    budgets were tried."""

    probes: tuple[Probe, ...]
    unlimited: Figures
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Search:
    """Plans by their batch or their budget, each once. `tell` hears of each as soon as it is known."""

    plan_at: PlanAt
    found: dict[int, Probe]
    tell: Tell = _untold

    def probe(self, at: int) -> Probe:
        """Raises MbcError for what is wrong at any batch and any budget."""
        if at not in self.found:
            try:
                self.found[at] = Probe(at, figures(self.plan_at(at)))
            except MbcError as error:
                if not _is_of_search(error):
                    raise
                self.found[at] = Probe(at, None, error)
            self.tell(self.found[at])
        return self.found[at]


def largest_batch(plan_at: PlanAt, start: int = 1, multiple: int = 1, tell: Tell = _untold, least: int = 0) -> BatchFit:
    """The largest multiple of `multiple` rows that plans, by doubling from about `start`, then between what
    fits and what does not, where the memory of the smallest plan found lets it be guessed.

    Between the largest and a part of it (LOWEST_SHARE) powers of two are planned as well, as points of the curve of
    images/s, and batches between these where lack of memory slows one of their neighbours. Fewer than `least` rows are
    not tried: no plan has them. Ctrl-C ends the search with what was found, if a batch was. Raises MBC194 where not
    even the smallest batch fits, and what planning raises that no batch would mend.
    """
    search = Search(plan_at, {}, tell)
    finished = True
    try:
        _seek(search, start, multiple, least)
        _seek_fastest(search, multiple)
    except KeyboardInterrupt:
        finished = False
    planned = [probe.figures for probe in search.found.values() if probe.figures is not None]
    if not planned:
        raise KeyboardInterrupt
    return BatchFit(
        tuple(search.found[at] for at in sorted(search.found)),
        max(planned, key=lambda f: f.batch),
        max(planned, key=lambda f: (f.images_per_s, f.batch)),
        finished,
    )


def _seek(search: Search, start: int, multiple: int, least: int) -> None:
    def fits(count: int) -> bool:
        return search.probe(count * multiple).figures is not None

    most = max(1, MOST_BATCH // multiple)
    first = min(max(1, -(-least // multiple)), most)
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
    count = 1
    while count < low:
        if count >= first and count * LOWEST_SHARE >= low:
            fits(count)
        count *= 2


def _seek_fastest(search: Search, multiple: int) -> None:
    """Try batches between two that fit, where the lower bounds of their steps leave room for more images/s.

    Memory that gets short slows steps by more than rows are added, so that the fastest batch may be between any two.
    """
    for _ in range(MOST_BETWEEN):
        planned = [f for f in (search.found[at].figures for at in sorted(search.found)) if f is not None]
        most = LEAST_GAIN * max(f.images_per_s for f in planned)
        gaps = [
            (max(_most_images_per_s(low), _most_images_per_s(high)), low.batch, high.batch)
            for low, high in itertools.pairwise(planned)
            if high.batch > LEAST_STEP * low.batch
        ]
        tried = [((low + high) // 2 // multiple * multiple, most_here) for most_here, low, high in gaps]
        tried = [(at, most_here) for at, most_here in tried if most_here > most and at not in search.found]
        if not tried:
            return
        search.probe(max(tried, key=lambda one: one[1])[0])


def _between(fits: Callable[[int], bool], guess: Callable[[int], int], low: int, high: int) -> int:
    """The largest count that fits, where `low` does and `high` does not.

    A try takes minutes where much has to be moved: the first is where `guess` of a count that does not fit says. After
    a guess that fits steps are STRIDE times as long each time; after MOST_GUESSES that do not what is left is halved.
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
    """The batch that may just fit, if what the smallest plan of a `refused` one takes beside the overhead were in
    proportion to the rows; half-way where there was none."""
    here, refusal = search.probe(fitting).figures, search.probe(refused).refusal
    assert here is not None
    if not isinstance(refusal, BudgetError):
        return (fitting + refused) // 2
    overhead_bytes = here.needed_bytes - here.arena_bytes
    return refused * (here.budget_bytes - overhead_bytes) // max(1, refusal.needed_bytes - overhead_bytes)


def budget_curve(plan_at: PlanAt, points: int, tell: Tell = _untold) -> BudgetCurve:
    """Plans at `points` (two or more) budgets, evenly from the floor to what the plan without a limit takes, the
    largest first. Ctrl-C ends it with what was found, if the plan without a limit was."""
    search = Search(plan_at, {}, tell)
    unlimited = figures(plan_at(UNLIMITED_BYTES))
    least, most = unlimited.floor_bytes, unlimited.needed_bytes
    finished = True
    try:
        for i in reversed(range(points)):
            search.probe(least + (most - least) * i // (points - 1))
    except KeyboardInterrupt:
        finished = False
    return BudgetCurve(tuple(search.found[at] for at in sorted(search.found)), unlimited, finished)


def own_batch(source: Source, options: Options) -> int:
    """The batch of the network as `options` set it. MBC195 where it has no parameter that a batch could be set by."""
    program = parse(source)
    chosen = choose_network(program, options.network)
    if BATCH not in (parameter.name for parameter in chosen.parameters):
        raise MbcError(
            "MBC195",
            f"`{chosen.name}` has no parameter `{BATCH}`, so that no other batch can be tried",
            f"write `network {chosen.name}({BATCH} = 64, …)` and `input NAME[{BATCH}, …]`",
            chosen.span,
        )
    return lower(program, options.settings, options.network).network.batch


def with_batch(options: Options, batch: int) -> Options:
    """`options` for so many rows, whatever they say of the batch."""
    return _set(options, BATCH, str(batch))


def with_budget(options: Options, budget_bytes: int) -> Options:
    """`options` for such a budget, whatever they say of it."""
    return _set(options, "memory.device", f"{budget_bytes} B")


def _set(options: Options, name: str, value: str) -> Options:
    kept = tuple(setting for setting in options.settings if setting[0] != name)
    return replace(options, settings=(*kept, (name, value)))


def _is_of_search(error: MbcError) -> bool:
    # Codes of the search say that no plan was found; a smaller batch may have one.
    return isinstance(error, BudgetError) or error.code.startswith("MBC2")


def nothing_fits(probe: Probe, batch: int) -> MbcError:
    """MBC194, or what was wrong with the smallest batch that was tried."""
    refusal = probe.refusal
    assert refusal is not None
    if not isinstance(refusal, BudgetError):
        return refusal
    enough = f"to at least {show_enough(refusal.floor_bytes)}: most plans take more"
    if refusal.needed_bytes > refusal.floor_bytes:
        enough = (
            f"to {show_enough(refusal.needed_bytes)}, as the smallest plan that was found takes; the lower bound "
            f"of all plans is {show_size(refusal.floor_bytes)}"
        )
    return MbcError(
        "MBC194",
        f"nothing fits, not even a batch of {batch}: {refusal.message}",
        f"raise --memory {enough}",
        refusal.span,
    )
