"""How a step reports the metrics that a source names, beside the rows that it classifies correctly."""

from __future__ import annotations

# What trainings report of themselves, in the log and in their lines.
_RESERVED = frozenset(
    (
        "loss", "accuracy", "kind", "step", "epoch", "waited_s", "learning_rate", "images_per_s", "seconds",
        "bad_steps",
    )
)  # fmt: skip
_VALUE, _OVER_RANKS = "metric.", "sum."


def is_reserved(name: str) -> bool:
    """Whether a metric of this name would be taken for another figure: `accuracy_2` is of the second loss, `test_…` of
    the test data."""
    return name in _RESERVED or name.startswith(("accuracy_", "test_"))


def value_of(name: str) -> str:
    """The value of a training graph that holds a metric; no layer can be called so, since `metric` is a word."""
    return f"{_VALUE}{name}"


def name_of(value: str) -> str | None:
    """What the source calls a value of `TrainingGraph.metrics`; None for one that counts rows."""
    value = value.removeprefix(_OVER_RANKS)
    return value.removeprefix(_VALUE) if value.startswith(_VALUE) else None
