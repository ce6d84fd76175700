"""The whole intermediate representation, on one page.

A `Network` is the forward graph as written. A `TrainingGraph` is one training iteration (forward, backward, update) and
the inference graph, over the same states. Both are lists of `Operation`s in an order that can be executed; every value
is assigned once. Layout, address and division into micro-batches are not the graph's business.
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
    """What a value is to the outside of the graph."""

    INPUT = "input"  # written by the user before a step
    PARAMETER = "parameter"  # trained
    STATISTIC = "statistic"  # running mean or variance
    OPTIMIZER = "optimizer"  # momentum and the like
    GRADIENT = "gradient"  # sums over the mini-batches of a step, so that none is left between steps
    CONTROL = "control"  # the control block (mbc/ir/control.py)
    INTERMEDIATE = "intermediate"  # everything else

    @property
    def persistent(self) -> bool:
        """Whether the value outlives a step."""
        return self in (Role.PARAMETER, Role.STATISTIC, Role.OPTIMIZER, Role.GRADIENT, Role.CONTROL)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor. `name` is unique in its graph and made of letters, digits, `_` and `.` only."""

    name: str
    type: TensorType
    role: Role = Role.INTERMEDIATE
    per_sample: bool = False  # the first dimension counts the samples of the mini-batch
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Attributes:
    """Settings of one kind of operation: subclasses hold only int, float, bool, str and tuples of these."""

    def with_rows(self, rows: int, before: int) -> Self:
        """Those of the same operation on another mini-batch than one of `before` rows: counts of elements differ."""
        return self


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. `kind` names an `OpKind` of `mbc.ops`, whose docstring gives the meaning of the operands."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Initializer:
    """How a state starts. `kind`: constant (value) | normal (std) | uniform (bound, both signs) |
    he | he_uniform | xavier | xavier_uniform (of fan_in and fan_out)."""

    kind: str
    value: float = 0.0
    fan_in: int = 0
    fan_out: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A value that outlives the step, and how it starts. `value` is also its name in a checkpoint."""

    value: str
    initializer: Initializer


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """What is different for the parameters whose names match a pattern (`mbc.ir.parameter_groups`). `rate`: a factor
    of the learning rate. None: as without the group."""

    pattern: str
    rate: float | None = optional(None)
    weight_decay: float | None = optional(None)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`kind`: sgd (momentum, nesterov, weight_decay) | adamw (beta1, beta2, eps, weight_decay) | lars (as sgd; trust,
    eps) | lamb (as adamw). `no_decay`:
    `norm_and_bias` or empty, the parameters without weight decay. Of `groups` that match, the last counts. Parameters
    that a pattern of `frozen` matches are not trained. Gradients are clipped to the L2 norm `clip_norm` of all of them,
    and then element by element to `clip_value`; 0: they are not. `ema`: the decay of the moving averages of trained
    parameters and of statistics (`mbc.ir.averages`); 0: there are none. A step adds the gradients of
    `accumulate` mini-batches up before it updates, by their mean. `noise_scale`: a step reports the squared norms that
    tell the gradient noise scale (`mbc.ir.metrics`)."""

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


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the rows of a global mini-batch are shared by ranks, of which each trains on a GPU of its own. `rows`: of
    each rank, in the order of the mini-batch; `members`: the ranks that run this graph, which have equally many."""

    rows: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def batch(self) -> int:
        """Rows of the global mini-batch."""
        return sum(self.rows)

    @property
    def share(self) -> float:
        """The part of the global mini-batch that one of `members` has."""
        return self.rows[self.members[0]] / self.batch

    def first_row(self, rank: int) -> int:
        """Of a rank's rows, in the global mini-batch."""
        return sum(self.rows[:rank])


@dataclass(frozen=True, slots=True)
class Network:
    """The forward graph as written. `losses` are (scalar value, weight), `metrics` (name, such pairs)."""

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

    `updates` pairs each state that changes with the value that it has after the step. `metrics` are scalars a step
    reports besides `loss`: the number of rows classified correctly, per loss, and those that the source names
    (`ir/metrics`). `batch` and all types are of the rows of one rank; with several, gradients, loss and metrics are
    summed over them (`all_reduce`), each rank's loss having been multiplied by its share of the rows. None: there is
    one rank. Where a step takes several mini-batches (`optimizer.accumulate`) `batch` is of one of them, and loss and
    metrics are sums over all.
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
    infer_inputs: tuple[str, ...]  # those that `outputs` depend on
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
