"""Mini-batches that fit: doubled from the base batch up and halved down, each with a whole plan of its own."""

from __future__ import annotations

from collections.abc import Callable

from mbc.fit import MOST_BATCH, PlanAt, Probe, Search, Tell, nothing_fits

HALVINGS = 3  # below the base batch: where rows are worth most, and images/s least
LEAST_GAIN = 1.01  # in goodput, of a larger batch
DOUBLINGS_WITHOUT_GAIN = 2  # images/s are not monotonous: one doubling may lose what the next one gains


def gpu_counts(gpus: int) -> tuple[int, ...]:
    """How many of `gpus` GPUs are tried: all, and the powers of two below."""
    return (*(1 << power for power in range(gpus.bit_length()) if 1 << power < gpus), gpus)


def climb(
    plan_at: PlanAt, base: int, gpus: int, most: int = MOST_BATCH, worth: Callable[[int], float] = lambda _: 1.0,
    found: dict[int, Probe] | None = None, tell: Tell = lambda _: None,
) -> tuple[Probe, ...]:  # fmt: skip
    """Probes by batch: `base` doubled while it fits, has at most `most` rows and gains goodput, which is images/s times
    `worth` of a row of such a batch; once by a half above the last that fits; and halved HALVINGS times, or until
    something fits; multiples of `gpus`. `found`: those known already. Raises MBC194 where nothing fits, and what
    planning raises that no batch would mend."""
    search = Search(plan_at, {} if found is None else found, tell)
    tried: dict[int, Probe] = {}

    def fits(batch: int) -> bool:
        tried[batch] = search.probe(batch)
        return tried[batch].figures is not None

    first = max(gpus, min(base, most) // gpus * gpus)
    batch, best, without_gain = first, 0.0, 0
    while batch <= most and without_gain < DOUBLINGS_WITHOUT_GAIN and fits(batch):
        reached = worth(batch) * _images_per_s(tried[batch])
        without_gain = 0 if reached > LEAST_GAIN * best else without_gain + 1
        best, batch = max(best, reached), 2 * batch
    between = 3 * batch // 4 // gpus * gpus
    if batch > first and batch in tried and tried[batch].figures is None and between > batch // 2:
        fits(between)
    lower = first
    while lower // 2 >= gpus and (lower * (1 << HALVINGS) > first or tried[lower].figures is None):
        lower = lower // 2 // gpus * gpus
        fits(lower)
    if all(probe.figures is None for probe in tried.values()):
        raise nothing_fits(tried[lower], lower)
    return tuple(tried[at] for at in sorted(tried))


def _images_per_s(probe: Probe) -> float:
    return 0.0 if probe.figures is None else probe.figures.images_per_s
