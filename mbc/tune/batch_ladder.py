"""Mini-batches that fit: doubled from the base batch up and halved down, each with a complete plan of its own."""

from __future__ import annotations

from collections.abc import Callable

from mbc.fit import MOST_BATCH, PlanAt, Probe, Search, Tell, nothing_fits

HALVINGS = 3  # steps below the base batch, where rows have the highest efficiency, and images/s are lowest
LEAST_GAIN = 1.01  # factor of goodput by which a larger batch must gain
DOUBLINGS_WITHOUT_GAIN = 2  # images/s are not monotonous: after a doubling that loses, the next one may gain


def gpu_counts(gpus: int) -> tuple[int, ...]:
    """Return the numbers of GPUs to try: `gpus`, and all smaller powers of two."""
    return (*(1 << power for power in range(gpus.bit_length()) if 1 << power < gpus), gpus)


def climb(
    plan_at: PlanAt, base: int, gpus: int, most: int = MOST_BATCH, row_value: Callable[[int], float] = lambda _: 1.0,
    probes: dict[int, Probe] | None = None, tell: Tell = lambda _: None,
) -> tuple[Probe, ...]:  # fmt: skip
    """Return probes of mini-batches, in the order of their rows.

    The base batch is doubled while it fits, has at most `most` rows and gains goodput. Then one batch is tried that is
    larger by half than the last one that fits. Then the base batch is halved HALVINGS times, or until a batch fits. All
    batches are multiples of `gpus`.

    Args:
        plan_at: Plans the network for a batch.
        base: Rows of the base batch.
        gpus: Number of GPUs.
        most: Most rows of a batch.
        row_value: Statistical efficiency of a row as a function of the batch; goodput is images/s times this value.
        probes: Probes that are available already, by batch; new ones are added.
        tell: Called with messages about the search.

    Raises:
        MbcError: MBC194 if no batch fits, and planning errors that no batch size would avoid.
    """
    search = Search(plan_at, {} if probes is None else probes, tell)
    tried: dict[int, Probe] = {}

    def fits(batch: int) -> bool:
        tried[batch] = search.probe(batch)
        return tried[batch].figures is not None

    first = max(gpus, min(base, most) // gpus * gpus)
    batch, best, without_gain = first, 0.0, 0
    while batch <= most and without_gain < DOUBLINGS_WITHOUT_GAIN and fits(batch):
        reached = row_value(batch) * _images_per_s(tried[batch])
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
