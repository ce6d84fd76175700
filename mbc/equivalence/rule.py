"""The largest difference allowed between the divided and the undivided step of a network.

Two correct implementations differ by rounding, and a deep network magnifies rounding: a ReLU whose input moves across
zero changes gradients by far more than the error that moved it. No fixed tolerance separates such differences from
errors, but a comparison does: the error of the divided step may be at most twice the error of the undivided step, plus
a floor. The error is the normalised L2 distance |a - b| / |b| from

* the same step in float64, if the network is small enough for NumPy;
* otherwise the undivided step. The undivided step's own error is then its distance from a step whose weights are off at
  random by the error that one kernel call may have (`TOLERANCES` of mbc/measure/gemm_trial.py).

The floor is that tolerance times the root of the number of divided operations, because independent errors add up as
their squares: the divided calls may use a less exact algorithm than the undivided ones. For gradients the floor is the
square root of that: about the same share of choices (ReLU, max pooling) differs, which changes a gradient by the square
root of the share. A tensor with an error of a half or more in the undivided step is not judged; an example is the
gradient of a bias before a batch norm, which is only rounding errors. Chance may still affect one step more than the
other: a tensor that fails is drawn again with other inputs, and fails only if it fails in each draw. A lost or doubled
slice causes a large error in each draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mbc.equivalence.run_step import Outcome, Part, distance, finite
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.measure.gemm_trial import TOLERANCES

TIMES_UNDIVIDED = 2.0
NOISE = 0.5
DRAWS = 3


class Reference(StrEnum):
    """The step that the two steps are compared with."""

    FLOAT64 = "float64"
    PERTURBED = "perturbed"  # the undivided step with slightly changed weights
    NONE = "none"  # the distance itself is limited by a tolerance of the user


@dataclass(frozen=True, slots=True)
class Draw:
    """The divided and the undivided step on equal inputs, and the reference step if `Reference` names one."""

    divided: Outcome
    undivided: Outcome
    reference: Outcome | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one tensor.

    Attributes:
        part: The part of the step that the tensor belongs to.
        name: The tensor's name.
        distance: The distance of the divided step from the undivided step.
        error: The error of the divided step.
        yardstick: The error of the undivided step.
        limit: The largest error that passes.
        is_conclusive: False if the undivided step's error is so large that the tensor is not judged.
    """

    part: Part
    name: str
    distance: float
    error: float
    yardstick: float
    limit: float
    is_conclusive: bool

    @property
    def passed(self) -> bool:
        """True unless the error exceeds the limit in a tensor that is judged."""
        return not self.is_conclusive or (math.isfinite(self.error) and self.error <= self.limit)

    @property
    def badness(self) -> float:
        """The error divided by the limit; -1 for a tensor that is not judged."""
        if not self.is_conclusive:
            return -1.0
        if not (self.limit and math.isfinite(self.error)):
            return math.inf if self.error else 0.0
        return self.error / self.limit


def compare(
    draw: Callable[[int], Draw],
    reference: Reference,
    precision: Precision,
    tolerance: float | None = None,
    operations: int = 1,
) -> tuple[Comparison, ...]:
    """Return the comparison of each tensor of a step, the worst first, each in its best draw.

    Args:
        draw: Runs both steps on the inputs with this number.
        reference: The step that both are compared with.
        precision: The precision of both steps.
        tolerance: The largest error, without a reference (`Reference.NONE`).
        operations: The number of divided operations.

    Raises:
        MbcError: MBC198 if no gradient can be judged.
    """
    comparisons = compare_once(draw(0), reference, precision, tolerance, operations)
    if not any(c.is_conclusive for c in comparisons.values() if c.part is Part.GRADIENT):
        raise MbcError(
            "MBC198",
            f"rounding errors in {precision} are as large as each gradient, so a comparison proves nothing",
            "check a higher precision, or the operations one by one with --operations",
        )
    for number in range(1, DRAWS):
        failing = [key for key, comparison in comparisons.items() if not comparison.passed]
        if not failing:
            break
        again = compare_once(draw(number), reference, precision, tolerance, operations)
        for key in failing:
            # A tensor that cannot be judged in this draw has not passed.
            if again[key].is_conclusive and again[key].badness < comparisons[key].badness:
                comparisons[key] = again[key]
    return tuple(sorted(comparisons.values(), key=lambda c: (-c.badness, -c.distance, c.part, c.name)))


def compare_once(
    draw: Draw, reference: Reference, precision: Precision, tolerance: float | None, operations: int
) -> dict[tuple[Part, str], Comparison]:
    """Return the comparison of each tensor in one draw."""
    comparisons: dict[tuple[Part, str], Comparison] = {}
    for key, ours in draw.divided.tensors.items():
        part, name = key
        theirs = draw.undivided.tensors[key]
        apart = distance(ours, theirs)
        if draw.reference is None:
            assert tolerance is not None, "without a reference there must be a tolerance"
            comparisons[key] = Comparison(part, name, apart, apart, 0.0, tolerance, True)
            continue
        third = draw.reference.tensors[key]
        if reference is Reference.FLOAT64:
            error, yardstick = distance(ours, third), distance(theirs, third)
        else:
            error, yardstick = apart, distance(third, theirs)
        limit = TIMES_UNDIVIDED * yardstick + floor(part, precision, operations)
        # A tensor that is finite only in the undivided step is wrong in any case.
        is_conclusive = yardstick < NOISE or finite((theirs,)) > finite((ours,))
        comparisons[key] = Comparison(part, name, apart, error, yardstick, limit, is_conclusive)
    return comparisons


def floor(part: Part, precision: Precision, operations: int) -> float:
    """Return the error that a step with this number of divided operations may always have."""
    least = TOLERANCES[precision] * math.sqrt(operations)
    return math.sqrt(least) if part is Part.GRADIENT else least


def passed(comparisons: Sequence[Comparison]) -> bool:
    """Return whether all comparisons passed."""
    return all(comparison.passed for comparison in comparisons)
