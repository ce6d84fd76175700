"""Engine configurations of cuDNN's graph (backend) API, and which of them may be used."""

from __future__ import annotations

from dataclasses import dataclass, field

from mbc.ir.types import Precision
from mbc.measure.cudnn_constants import Constant
from mbc.measure.cudnn_library import Descriptor


def _notes(prefix: str) -> dict[int, str]:
    names = [name for name in vars(Constant) if name.startswith(prefix) and not name.endswith("TYPE_COUNT")]
    return {getattr(Constant, name): name.removeprefix(prefix) for name in names}


NUMERICAL_NOTES = _notes("NUMERICAL_NOTE_")
BEHAVIOUR_NOTES = _notes("BEHAVIOR_NOTE_")

# Numerical notes that an engine must not have. The fast algorithms have additional errors: `admitted` allows them once
# the error has been measured. Tensor cores round fp32 operands (TF32), which strict precisions do not allow.
FAST_ALGORITHMS = frozenset({"FFT", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13"})
REFUSED_NOTES = frozenset({"DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION"}) | FAST_ALGORITHMS
STRICT = frozenset({Precision.FP32, Precision.FP64})


@dataclass(frozen=True, slots=True)
class Configuration:
    """An engine with its knobs.

    `knobs` are sorted (type, value) pairs. `numerical` and `behaviour` are names of notes without their prefix.
    """

    engine: int
    knobs: tuple[tuple[int, int], ...]
    numerical: frozenset[str]
    behaviour: frozenset[str]
    descriptor: Descriptor = field(repr=False, compare=False)

    @property
    def settings(self) -> tuple[tuple[str, int], ...]:
        """The configuration as plans and profiles store it."""
        return (("engine", self.engine), *((f"knob{kind}", value) for kind, value in self.knobs))

    @property
    def deterministic(self) -> bool:
        """True if equal operands always give equal results."""
        return "NONDETERMINISTIC" not in self.numerical

    @property
    def compiles_at_run_time(self) -> bool:
        """True if the engine is compiled at run time."""
        return "RUNTIME_COMPILATION" in self.behaviour


def refusal(
    configuration: Configuration,
    precision: Precision,
    deterministic: bool = False,
    admitted: frozenset[str] = frozenset(),
) -> str | None:
    """Return why a configuration must not be used, or None if it may be.

    Args:
        configuration: The engine with its knobs and notes.
        precision: The precision of the operation.
        deterministic: Refuse an engine whose results may vary.
        admitted: Names of notes that are allowed although `REFUSED_NOTES` has them.
    """
    if configuration.compiles_at_run_time:
        return "it is compiled at run time, for which NVRTC must be installed"
    refused = REFUSED_NOTES | ({"TENSOR_CORE"} if precision in STRICT else frozenset[str]())
    if deterministic:
        refused = refused | {"NONDETERMINISTIC"}
    notes = sorted((refused - admitted) & configuration.numerical)
    return f"its notes {', '.join(notes)} are not admitted in {precision}" if notes else None
