"""The whole intermediate representation, on one page.

A `Network` is the forward graph as written. A `TrainingGraph` is one training iteration (forward, backward, update) and
the inference graph, over the same states. Both are lists of `Operation`s in an order that can be executed; every value
is assigned once. The graph does not say anything about layouts, addresses and division into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from mbc.ir.optional import optional
from mbc.ir.types import Precision, TensorType
from mbc.source import Span


class Role(StrEnum):
    """Role of a value for the world outside the graph."""

    INPUT = "input"  # written by the user before a step
    PARAMETER = "parameter"  # trained
    STATISTIC = "statistic"  # running mean or variance
    OPTIMIZER = "optimizer"  # such as momentum
    GRADIENT = "gradient"  # sum over the mini-batches of a step; not saved between steps
    CONTROL = "control"  # the control block (mbc/ir/control.py)
    INTERMEDIATE = "intermediate"  # everything else

    @property
    def persistent(self) -> bool:
        """True if the value outlives a step."""
        return self in (Role.PARAMETER, Role.STATISTIC, Role.OPTIMIZER, Role.GRADIENT, Role.CONTROL)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor. `name` is unique in its graph and consists of letters, digits, `_` and `.` only."""

    name: str
    type: TensorType
    role: Role = Role.INTERMEDIATE
    per_sample: bool = False  # the first dimension counts the samples of the mini-batch
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Attributes:
    """Settings of one kind of operation. Subclasses hold only int, float, bool, str and tuples of these types."""

    def with_rows(self, rows: int, before: int) -> Self:
        """Return the attributes for a mini-batch of `rows` rows instead of `before`; counts of elements differ."""
        return self


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. `kind` names an `OpKind` of `mbc.ops`, whose docstring explains the operands."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Initializer:
    """The initial values of a state.

    `kind` is constant (value), normal (std), uniform (bound, both signs), or he, he_uniform, xavier, xavier_uniform (of
    fan_in and fan_out).
    """

    kind: str
    value: float = 0.0
    fan_in: int = 0
    fan_out: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A value that outlives the step, and its initial values. `value` is also the name of the state in a checkpoint."""

    value: str
    initializer: Initializer


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Settings of the parameters whose names match a pattern (`mbc.ir.parameter_groups`).

    None leaves a setting as it is without the group. `rate` is a factor of the learning rate.
    """

    pattern: str
    rate: float | None = optional(None)
    weight_decay: float | None = optional(None)


NO_OPTIMIZER = "none"  # kind of the optimizer of a step that leaves the update to its caller


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer and the other settings of a step.

    Attributes:
        kind: sgd (momentum, nesterov, weight_decay), adamw (beta1, beta2, eps, weight_decay), lars (as sgd; trust,
            eps), lamb (as adamw), or none: the step leaves gradients to its caller (`mbc.plan.cut`).
        momentum: Momentum of sgd and lars.
        nesterov: Whether momentum is Nesterov's.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Number that is added to a denominator.
        weight_decay: Weight decay.
        no_decay: Parameters without weight decay: `norm_and_bias`, or empty.
        groups: Settings of some parameters; the last group that matches counts.
        frozen: Patterns of parameters that are not trained.
        clip_norm: Largest L2 norm of all gradients together; 0: there is no limit.
        clip_value: Largest absolute value of an element of a gradient, after `clip_norm`; 0: there is no limit.
        ema: Decay of the moving averages of trained parameters and statistics (`mbc.ir.averages`); 0: there are none.
        accumulate: Number of mini-batches whose gradients a step adds; it updates with their mean.
        trust: Trust coefficient of lars.
        noise_scale: Whether a step reports the squared norms for the gradient noise scale (`mbc.ir.metrics`).
        input_gradients: Whether a step without an optimizer also computes the gradients of its inputs.
    """

    kind: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: str = optional("")
    groups: tuple[ParameterGroup, ...] = optional(())
    frozen: tuple[str, ...] = optional(())
    clip_norm: float = optional(0.0)
    clip_value: float = optional(0.0)
    ema: float = optional(0.0)
    accumulate: int = optional(1)
    trust: float = optional(0.0)
    noise_scale: bool = optional(False)
    input_gradients: bool = optional(False)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rows of a global mini-batch that each rank gets; each rank trains on a GPU of its own.

    Attributes:
        rows: Rows of each rank, in the order of the mini-batch.
        members: Ranks that run this graph; they have equally many rows.
    """

    rows: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def batch(self) -> int:
        """Rows of the global mini-batch."""
        return sum(self.rows)

    @property
    def share(self) -> float:
        """Share of the global mini-batch that each of `members` has."""
        return self.rows[self.members[0]] / self.batch

    def first_row(self, rank: int) -> int:
        """Return the index in the global mini-batch of a rank's first row."""
        return sum(self.rows[:rank])


@dataclass(frozen=True, slots=True)
class Network:
    """The forward graph as the source describes it.

    `losses` are pairs (scalar value, weight). `metrics` are pairs (name, terms), whose terms are such pairs, too.
    """

    name: str
    batch: int
    values: Mapping[str, Value]
    operations: tuple[Operation, ...]
    states: tuple[State, ...]  # parameters and statistics, in the order of the source
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    losses: tuple[tuple[str, float], ...]
    metrics: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """One training step and one inference pass over the same states.

    `updates` pairs each state that changes with its value after the step. `metrics` are scalars that a step reports
    besides `loss`: for each loss the number of rows classified correctly, and the metrics that the source names
    (`ir/metrics`).

    `batch` and all types are of the rows of one rank. With several ranks, each rank's loss is multiplied by its share
    of the rows, and gradients, loss and metrics are summed over ranks (`all_reduce`). `ranks` None: there is one rank.
    If a step takes several mini-batches (`optimizer.accumulate`), `batch` is of one of them, and loss and metrics are
    sums over all.
    """

    name: str
    batch: int
    precision: Precision
    optimizer: Optimizer
    values: Mapping[str, Value]
    train: tuple[Operation, ...]
    infer: tuple[Operation, ...]
    states: tuple[State, ...]
    inputs: tuple[str, ...]
    infer_inputs: tuple[str, ...]  # inputs on which `outputs` depend
    outputs: tuple[str, ...]
    infer_outputs: tuple[str, ...]  # the same outputs as the inference graph computes them
    loss: str
    metrics: tuple[str, ...]
    updates: tuple[tuple[str, str], ...]
    ranks: Ranks | None = None

    @property
    def global_batch(self) -> int:
        """Rows of the mini-batch that all ranks share."""
        return self.batch if self.ranks is None else self.ranks.batch

    @property
    def step_batch(self) -> int:
        """Rows of a step of this rank: those of all its mini-batches."""
        return self.batch * self.optimizer.accumulate
