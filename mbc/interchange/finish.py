"""Simplifies the steps of a whole network: shared concatenations, unused parts, labels and value numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mbc.interchange.steps import Number, Setting, Step
from mbc.ops import LAYERS

Shapes = Mapping[int, tuple[int, ...]]
_SLICE = {parameter.name: parameter.default for parameter in LAYERS["slice"].parameters}


def growing(steps: Sequence[Step]) -> list[Step]:
    """Return the steps.

    A concatenation that contains an earlier one takes the earlier result as an input (DenseNet).
    """
    joined: dict[tuple[int | Number, ...], int] = {}
    shortened: list[Step] = []
    for step in steps:
        if step.op == "concat" and not step.settings:
            counts = (n for n in range(len(step.inputs) - 1, 1, -1) if step.inputs[:n] in joined)
            count = next(counts, 0)
            joined.setdefault(step.inputs, step.results[0])
            if count:
                step = replace(step, inputs=(joined[step.inputs[:count]], *step.inputs[count:]))
        shortened.append(step)
    return shortened


def only_parts_that_are_used(steps: Sequence[Step], outputs: Sequence[int], shapes: Shapes) -> list[Step]:
    """Return the steps, where a split with unused parts becomes a slice for each part that is used."""
    used = {*outputs, *(value for step in steps for value in step.values)}
    kept: list[Step] = []
    for step in steps:
        if step.op not in ("chunk", "split") or used.issuperset(step.results):
            kept.append(step)
            continue
        axis = step.settings.get("axis", 1)
        assert isinstance(axis, int)
        start = 0
        for part in step.results:
            stop = start + shapes[part][axis]
            settings: dict[str, Setting] = {"axis": axis, "start": start, "stop": stop}
            settings = {name: value for name, value in settings.items() if value != _SLICE.get(name)}
            if stop == shapes[step.values[0]][axis]:
                del settings["stop"]
            if part in used:
                kept.append(replace(step, op="slice", results=(part,), settings=settings))
            start = stop
    return kept


def outside_of_others(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with no label inside another label, as a module with parameters may have such modules inside."""
    labels = {step.label for step in steps if step.label}
    inner = {".".join(label.split(".")[:n]) for label in labels for n in range(1, label.count(".") + 1)}
    return [replace(step, label=f"{step.label}.own") if step.label in inner else step for step in steps]


def renumbered(step: Step, numbers: Mapping[int, int]) -> Step:
    """Return a step with new value numbers."""
    inputs = tuple(value if isinstance(value, Number) else numbers[value] for value in step.inputs)
    return replace(step, inputs=inputs, results=tuple(numbers[value] for value in step.results))
