"""A plan: the only artefact that is saved, diffed, verified and rendered.

Buffers are named by their index in `Plan.buffers`, launches by their index in their program. Every size and offset
is in bytes. A lifetime is half-open, [first write, last read + 1), in launch order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from mbc.ir.graph import TrainingGraph
from mbc.ir.optional import optional
from mbc.ir.types import DType, Layout

SCHEMA_VERSION = 5
ALIGNMENT_BYTES = 256


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment of buffers."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Space(StrEnum):
    """Where a buffer lies: in the arena, in pinned memory of the host, or in memory that another GPU lends."""

    ARENA = "arena"
    HOST = "host"
    PEER = "peer"


class Mode(StrEnum):
    """What a launch does to the bytes of an access."""

    READ = "read"
    WRITE = "write"
    ACCUMULATE = "accumulate"  # adds to what is there


class Stream(StrEnum):
    """Launches of one stream run in order. TO_HOST and TO_DEVICE: copies to the host and back; TO_PEER and FROM_PEER:
    those to a peer's memory. CONCURRENT: the concurrent stream, of kernels that run concurrently with those of COMPUTE.
    COLLECTIVE: of collectives, which all ranks launch in one order."""

    COMPUTE = "compute"
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
    CONCURRENT = "concurrent"
    COLLECTIVE = "collective"
    TO_PEER = "to_peer"
    FROM_PEER = "from_peer"


# By space outside the arena: the streams of the copies there, and of those back. Each link has two lanes.
STREAM_TO: Mapping[Space, Stream] = MappingProxyType({Space.HOST: Stream.TO_HOST, Space.PEER: Stream.TO_PEER})
STREAM_FROM: Mapping[Space, Stream] = MappingProxyType({Space.HOST: Stream.TO_DEVICE, Space.PEER: Stream.FROM_PEER})
COPY_STREAMS = tuple(stream for space in STREAM_TO for stream in (STREAM_TO[space], STREAM_FROM[space]))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start` to `stop`, half-open, of the mini-batch. A value that is not per sample has the rows [0, 1)."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Buffer:
    """One live range of some rows of one value, in one layout, in one space. `value` None: workspace.

    `alias` names the buffer whose bytes this one reuses (in-place operations, updates of states).
    Values that are views of one another (`flatten`) have one buffer, of the viewed value.
    """

    value: str | None
    rows: Rows
    layout: Layout
    dtype: DType
    size_bytes: int
    space: Space = Space.ARENA
    alias: int | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Rows of a buffer that a launch touches. For workspace `rows` is the buffer's."""

    buffer: int
    rows: Rows
    mode: Mode


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel call. `provider` and `name` choose the entry of the generated dispatch table; `settings` are the
    provider's own (cuDNN engine and knobs). `measured`: the time is from a profile, else estimated."""

    provider: str
    name: str
    settings: tuple[tuple[str, int], ...]
    time_us: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between spaces or within the arena."""

    time_us: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call or copy on one stream.

    `accesses` of a kernel: the operation's inputs in order, then its outputs in order, then workspace if it has any.
    A layout or type conversion belongs to no operation: it reads one buffer of a value and writes another.
    """

    work: Kernel | Copy
    operations: tuple[str, ...]
    stream: Stream
    accesses: tuple[Access, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Launches in order, and the waits between streams: (earlier launch, later launch) of different streams.

    `entry`: buffers that hold their value before the first launch. `exit`: those that must hold theirs after the last.
    """

    launches: tuple[Launch, ...]
    waits: tuple[tuple[int, int], ...]
    entry: tuple[int, ...]
    exit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """What the plan is for. `cudnn` is its version number (91900), 0 when the plan names no cuDNN engine. `profile`
    says on what the known times were measured (GPU, driver, cuDNN, date), empty where there was no profile."""

    gpu: str
    architecture: str  # sm_90
    multiprocessors: int
    memory_bytes: int
    cudnn: int
    profile: str = ""


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """Of a plan's programs. `measured_share` is the part of `train_us` that comes from measured times.

    `low` and `high`: where the time should lie, the errors of its estimates being what they were found to be. Both are
    the time itself where all of it was measured.
    """

    train_us: float
    train_low_us: float
    train_high_us: float
    infer_us: float
    infer_low_us: float
    infer_high_us: float
    measured_share: float


@dataclass(frozen=True, slots=True)
class Predictions(PredictedTimes):
    """What a run will take.

    Of several ranks whose plan offloads to the host or recomputes: `host_gpus` of a machine copy to its memory at a
    time, by whose rates the plan is made, and `oblivious_us` is the time of the step that a search finds that takes
    each GPU for the only one, with those rates. 0: one GPU, or nothing of that.
    """

    arena_bytes: int
    overhead_bytes: int
    overhead_measured: bool
    host_bytes: int
    peer_bytes: int = optional(0)
    host_gpus: int = optional(0)
    oblivious_us: float = optional(0.0)

    def bytes_of(self, space: Space) -> int:
        """The size of a space."""
        return {Space.ARENA: self.arena_bytes, Space.HOST: self.host_bytes, Space.PEER: self.peer_bytes}[space]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of all plans of this graph, and of this plan's own choices.

    `floor_bytes`: inputs + output + smallest workspace of the most demanding operation, plus the states, or the states
    and inputs of a step where these are more: the lower bound of all plans. `live_bytes`: the peak live bytes of this
    plan, the lower bound of its placement. `fastest_us`: the best serial schedule: the fastest choice of kernels,
    divisions and layouts together, whatever workspace it takes, for the same candidates and fused groups; of several
    ranks with one sum of all gradients at the end.
    `nondeterministic_us`: the same with kernels that give other bits in each run; 0 where these are admitted anyway.
    `within_budget_us`: with the operations in this order no plan within the budget is faster; 0 where this was not
    computed. All three are of serial schedules: a plan with a concurrent stream may be faster. `critical_path_us`: the
    critical-path lower bound of plans with a concurrent stream, or with collectives beside the kernels, the same
    candidates and fused groups, undivided where this one is; 0 where all launches run serially.
    """

    floor_bytes: int
    floor_operation: str
    live_bytes: int
    fastest_us: float
    nondeterministic_us: float = 0.0
    within_budget_us: float = 0.0
    critical_path_us: float = 0.0

    @property
    def least_us(self) -> float:
        """The lower bound of plans whose kernels run as this one's do, concurrently or serially."""
        return self.critical_path_us or max(self.fastest_us, self.within_budget_us)


@dataclass(frozen=True, slots=True)
class Plan:
    """`offsets[i]` is the address of `buffers[i]` from the start of its space.

    `budget_bytes` bounds arena and overhead, `host_limit_bytes` the pinned host memory (None: nothing does),
    `peer_limit_bytes` the memory of another GPU. `settings`: what was asked for in place of what the source says, by
    `--set NAME=VALUE`; of several of one name the last.
    """

    version: str  # of mbc
    graph: TrainingGraph
    target: Target
    budget_bytes: int
    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    train: Program
    infer: Program
    predictions: Predictions
    bounds: Bounds
    host_limit_bytes: int | None = None
    peer_limit_bytes: int = 0
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def settings_text(self) -> str:
        """`depth=50, batch=64`; empty where all is as the source says."""
        return ", ".join(f"{name}={value}" for name, value in self.settings)

    @property
    def arena_budget_bytes(self) -> int:
        """What the budget leaves for the arena."""
        return self.budget_bytes - self.predictions.overhead_bytes

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from mbc.report.html.notebook import plan_fragment

        return plan_fragment(self)
