"""What may differ between the divided and the undivided step of a network.

Two ways of computing that are both right differ by rounding, and a deep network magnifies rounding: a ReLU whose input
comes out on the other side of zero moves gradients by far more than the error that caused it. What a fixed tolerance
cannot tell apart, a comparison can: the divided step may be wrong by at most twice what the undivided step itself is
wrong by, plus a floor. Wrong is the normalised L2 distance |a - b| / |b| from the same step

* in float64, where the network is small enough for NumPy;
* else from the undivided step, and the undivided step's own measure is how far it moves when all weights are off at
  random by what one kernel call may be off (`TOLERANCES` of mbc/measure/gemm_trial.py).

The floor is that tolerance times the root of the number of divided operations, because independent errors add up as
their squares do: the divided calls may well be of an algorithm that is less exact than the undivided ones. For
gradients it is the square root of that: of choices (ReLU, max pooling) about as large a share comes out otherwise,
which moves a gradient by the square root of the share. A tensor that the undivided step does not know itself (wrong
by half and more, as the gradient of a bias before a batch norm, which is nothing but rounding) is not judged. Chance
may still hit one step harder than the other: what fails is drawn again with other inputs, and fails when it does so
in every draw. A lost or doubled slice is wrong by a good part of the whole, in every draw.
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
    """What the two steps are held against."""

    FLOAT64 = "float64"
    PERTURBED = "perturbed"  # the undivided step with weights that are a little off
    NONE = "none"  # the distance itself must keep to a tolerance that the user gives


@dataclass(frozen=True, slots=True)
class Draw:
    """The two steps on the same inputs; `reference`: the step that `Reference` names, if any."""

    divided: Outcome
    undivided: Outcome
    reference: Outcome | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor. `distance`: of the divided from the undivided step. `error` of the divided step must be at most
    `limit`, and `yardstick` is the undivided step's own; `known`: whether that says anything."""

    part: Part
    name: str
    distance: float
    error: float
    yardstick: float
    limit: float
    known: bool

    @property
    def passed(self) -> bool:
        return not self.known or (math.isfinite(self.error) and self.error <= self.limit)

    @property
    def badness(self) -> float:
        """Error over limit; below everything where nothing is known."""
        if not self.known:
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
    """All tensors of a step, the worst first, each as it comes out in its best draw.

    `draw` runs both steps on the inputs of that number; `operations` of the one are divided. With `reference` NONE,
    `tolerance` is the limit. MBC198 where no gradient is known well enough to be judged.
    """
    found = compare_once(draw(0), reference, precision, tolerance, operations)
    if not any(c.known for c in found.values() if c.part is Part.GRADIENT):
        raise MbcError(
            "MBC198",
            f"rounding in {precision} is as large as every gradient, so a step shows nothing",
            "check a higher precision, or the operations one by one with --operations",
        )
    for number in range(1, DRAWS):
        failing = [key for key, comparison in found.items() if not comparison.passed]
        if not failing:
            break
        again = compare_once(draw(number), reference, precision, tolerance, operations)
        for key in failing:
            # A tensor that is noise in one draw has not passed by that.
            if again[key].known and again[key].badness < found[key].badness:
                found[key] = again[key]
    return tuple(sorted(found.values(), key=lambda c: (-c.badness, -c.distance, c.part, c.name)))


def compare_once(
    draw: Draw, reference: Reference, precision: Precision, tolerance: float | None, operations: int
) -> dict[tuple[Part, str], Comparison]:
    """Every tensor of one draw."""
    found: dict[tuple[Part, str], Comparison] = {}
    for key, ours in draw.divided.tensors.items():
        part, name = key
        theirs = draw.undivided.tensors[key]
        apart = distance(ours, theirs)
        if draw.reference is None:
            assert tolerance is not None, "without a reference there must be a tolerance"
            found[key] = Comparison(part, name, apart, apart, 0.0, tolerance, True)
            continue
        third = draw.reference.tensors[key]
        if reference is Reference.FLOAT64:
            error, yardstick = distance(ours, third), distance(theirs, third)
        else:
            error, yardstick = apart, distance(third, theirs)
        limit = TIMES_UNDIVIDED * yardstick + floor(part, precision, operations)
        # What is not finite in one step only is wrong, however little the other knows.
        known = yardstick < NOISE or finite((theirs,)) > finite((ours,))
        found[key] = Comparison(part, name, apart, error, yardstick, limit, known)
    return found


def floor(part: Part, precision: Precision, operations: int) -> float:
    """What a step of so many divided operations may be wrong by in any case."""
    least = TOLERANCES[precision] * math.sqrt(operations)
    return math.sqrt(least) if part is Part.GRADIENT else least


def passed(comparisons: Sequence[Comparison]) -> bool:
    return all(comparison.passed for comparison in comparisons)
