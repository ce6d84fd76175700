"""Modules of one network that train in lockstep on the same data, and the allowed difference of their results.

The first module has no limit of memory, the second runs within a budget. `thousand_steps.py` explains the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mbc.equivalence.rule import DRAWS, Comparison, Draw, Reference, compare_once
from mbc.equivalence.run_step import Outcome, Part
from mbc.ir.graph import Role
from mbc.measure.gemm_trial import TOLERANCES

LEARNING_RATE = 0.01
STATES_EVERY = 100

States = Mapping[str, np.ndarray]


class Run:
    """Two or three modules that train on the same mini-batches."""

    def __init__(self, modules: list[Any], batches: list[tuple[Any, ...]], momentum: float, different: int) -> None:
        """Take modules and mini-batches.

        `modules` are one without a limit, one within the budget, and, for the comparison of steps, another one without
        a limit. `different` operations are computed in another way within the budget.
        """
        self._free, self._capped, *self._others = modules
        self._batches, self._momentum, self._different = batches, momentum, different
        graph = self._free.plan.graph
        self._precision = graph.precision
        self._roles = {state.value: graph.values[state.value].role for state in graph.states}
        largest = max(int(np.prod(shape)) for shape in self._free.states.values())
        self._random = np.random.default_rng(0)
        self._noise = self._random.standard_normal(largest + (1 << 16)).astype(np.float32)

    def _step(self, module: Any, number: int) -> float:
        return float(module.step(*self._batches[number % len(self._batches)], lr=LEARNING_RATE))

    def same_bits(self, steps: int) -> dict[str, Any]:
        """Return whether both modules have equal bits after each step, when each continues from its own states."""
        losses: list[float] = []
        apart: list[int] = []
        states: dict[int, list[str]] = {}
        for number in range(1, steps + 1):
            loss, other = self._step(self._free, number), self._step(self._capped, number)
            losses.append(loss)
            if np.float64(loss).tobytes() != np.float64(other).tobytes():
                apart.append(number)
            if number % STATES_EVERY == 0 or number == steps:
                ours, theirs = states_to_offload(self._capped), states_to_offload(self._free)
                states[number] = [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()]
        wrong = {number: names for number, names in states.items() if names}
        return {
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "losses_compared": steps,
            "losses_apart": len(apart),
            "states_compared": len(states) * len(self._free.states),
            "states_apart": sum(map(len, wrong.values())),
            "apart_at": min((*apart, *wrong), default=None),
            "finite": bool(np.isfinite(losses).all()),
            "passed": not apart and not wrong and bool(np.isfinite(losses).all()),
        }

    def within_rule(self, steps: int, every: int) -> dict[str, Any]:
        """Return how far the modules are apart at every checked step.

        Between checked steps each continues by itself.
        """
        losses: list[float] = []
        worst: Comparison | None = None
        checked = compared = again = failed = same = 0
        states: States | None = None  # of the first, where the step before was checked
        for number in range(1, steps + 1):
            if number % every and number not in (1, steps):
                if states is not None:
                    put(self._capped, states)
                    states = None
                losses.append(self._step(self._free, number))
                self._step(self._capped, number)
                continue
            result, loss, draws, states = self._checked(number, states or states_to_offload(self._free))
            losses.append(loss)
            checked += 1
            compared += len(result)
            again += draws - 1
            same += all(c.distance == 0.0 for c in result)
            failed += sum(not c.passed for c in result)
            worst = max((c for c in (*result, worst) if c is not None), key=lambda c: c.badness)
        assert worst is not None
        return {
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "checked_steps": checked,
            "tensors_compared": compared,
            "drawn_again": again,
            "steps_of_same_bits": same,
            "tensors_failed": failed,
            "worst": f"{worst.part} {worst.name}",
            "worst_over_limit": worst.badness,
            "finite": bool(np.isfinite(losses).all()),
            "passed": not failed and bool(np.isfinite(losses).all()),
        }

    def _checked(self, number: int, before: States) -> tuple[list[Comparison], float, int, States]:
        """Return the comparison of the training step `number` from the states `before`.

        For each tensor the result has the best of all draws. It also has the loss, the number of draws, and the states
        of the first module after the step.
        """
        draw, loss, after = self._draw(before, number)
        result = self._compare(draw)
        draws = 1
        while draws < DRAWS and any(not c.passed for c in result.values()):
            put(self._free, before)
            once_more = self._compare(self._draw(before, number + draws)[0])
            draws += 1
            for key, comparison in result.items():
                better = once_more[key]
                if not comparison.passed and better.is_conclusive and better.badness < comparison.badness:
                    result[key] = better
        if draws > 1:
            put(self._free, after)
        return list(result.values()), loss, draws, after

    def _compare(self, draw: Draw) -> dict[tuple[Part, str], Comparison]:
        return compare_once(draw, Reference.PERTURBED, self._precision, None, max(1, self._different))

    def _draw(self, before: States, number: int) -> tuple[Draw, float, States]:
        """Take one step of all three modules on the same data from the states `before` of the first module."""
        (perturbed,) = self._others
        put(self._capped, before)
        put(perturbed, {name: self._perturbed(name, array) for name, array in before.items()})
        loss = self._step(self._free, number)
        after = states_to_offload(self._free)
        undivided = self._outcome(after.__getitem__, before, loss)
        divided = self._outcome(self._capped.state, before, self._step(self._capped, number))
        reference = self._outcome(perturbed.state, before, self._step(perturbed, number))
        return Draw(divided, undivided, reference), loss, after

    def _perturbed(self, name: str, array: np.ndarray) -> np.ndarray:
        if self._roles.get(name) is not Role.PARAMETER:
            return array
        begin = int(self._random.integers(1 << 16))
        noise = self._noise[begin : begin + array.size].reshape(array.shape)
        return array * (1 + np.float32(TOLERANCES[self._precision]) * noise)

    def _outcome(self, state: Callable[[str], np.ndarray], before: States, loss: float) -> Outcome:
        """Return the results of a step from the states `before`.

        The gradient, with weight decay, is the amount that the step added to the momentum.
        """
        tensors: dict[tuple[Part, str], np.ndarray] = {(Part.LOSS, "loss"): np.float64(loss).reshape(1)}
        for name, role in self._roles.items():
            if role is Role.STATISTIC:
                tensors[Part.STATISTIC, name] = state(name)
            elif role is Role.PARAMETER:
                momentum = f"{name}.momentum"
                tensors[Part.GRADIENT, name] = state(momentum) - np.float32(self._momentum) * before[momentum]
        return Outcome(self._free.device, 1, tensors)


def states_to_offload(module: Any) -> States:
    """Return all states of a module."""
    return {name: np.asarray(module.state(name)) for name in module.states}


def put(module: Any, states: States) -> None:
    """Give a module these states."""
    for name, array in states.items():
        module.set_state(name, array)
