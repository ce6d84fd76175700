"""A plan: the only artefact that is saved, diffed, verified and rendered.

A buffer is named by its index in `Plan.buffers`, a launch by its index in its program. Every size and offset is in
bytes. A lifetime is half-open, [first write, last read + 1), in launch order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mbc.hardware.datasheet import Datasheet, capability_of
from mbc.hardware.spec import DeviceSpec, known_spec, spec_like
from mbc.hardware.streams import Space, Stream
from mbc.hardware.transfers import Links
from mbc.ir.graph import TrainingGraph
from mbc.ir.optional import optional
from mbc.ir.types import DType, Layout

SCHEMA_VERSION = 5


class Mode(StrEnum):
    """Effect of a launch on the bytes of an access."""

    READ = "read"
    WRITE = "write"
    ACCUMULATE = "accumulate"  # adds to the present values


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start` to `stop`, half-open, of the mini-batch. A value that is not per sample has the rows [0, 1)."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Buffer:
    """One live range of some rows of one value, in one layout, in one space. `value` None: workspace.

    `alias` names the buffer whose bytes this buffer reuses (in-place operations, updates of states).
    Values that are views of one another (`flatten`) have one buffer, which names the viewed value.
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
    """Rows of a buffer that a launch touches. For workspace, `rows` are all rows of the buffer."""

    buffer: int
    rows: Rows
    mode: Mode


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel call.

    Attributes:
        provider: Provider of the kernel; with `name`, chooses the entry of the generated dispatch table.
        name: Name of the kernel.
        settings: Settings of the provider (cuDNN engine and knobs).
        time_us: Time of the call.
        measured: Whether the time is from a profile; otherwise it is estimated.
    """

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


def copy_work(links: Links, size_bytes: int, stream: Stream) -> Copy:
    """Return the work of a launch that copies `size_bytes` on the stream of a copy."""
    return Copy(links.copy_us(size_bytes, stream), links.of(stream).measured)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call or copy on one stream.

    The accesses of a kernel are the operation's inputs in order, then its outputs in order, then workspace if it has
    any. A layout or type conversion belongs to no operation: it reads one buffer of a value and writes another.
    """

    work: Kernel | Copy
    operations: tuple[str, ...]
    stream: Stream
    accesses: tuple[Access, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Launches in order, and the waits between streams: (earlier launch, later launch) of different streams.

    `entry` are the buffers that hold their value before the first launch, `exit` those that hold it after the last.
    """

    launches: tuple[Launch, ...]
    waits: tuple[tuple[int, int], ...]
    entry: tuple[int, ...]
    exit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """The GPU that the plan is for.

    Attributes:
        gpu: Name of the GPU.
        architecture: Architecture such as "sm_90".
        multiprocessors: Number of multiprocessors.
        memory_bytes: Memory of the GPU.
        cudnn: Version number of cuDNN (91900); 0 if the plan names no cuDNN engine.
        profile: GPU, driver, cuDNN and date of the measured times; empty without a profile.
        sheet: Figures of a GPU that no list has, or that differs from the listed one of its name; else None.
    """

    gpu: str
    architecture: str  # sm_90
    multiprocessors: int
    memory_bytes: int
    cudnn: int
    profile: str = ""
    sheet: Datasheet | None = optional(None)  # noqa: RUF009 - a field, no value

    @property
    def known_device(self) -> DeviceSpec | None:
        """The GPU's specification; None if the plan has no figures of the GPU and no list has it."""
        return known_spec(self.gpu, self.sheet)

    @property
    def device(self) -> DeviceSpec:
        """The GPU's specification, or that of a GPU of the same architecture (`spec_like`)."""
        return spec_like(self.gpu, self.architecture, self.sheet)

    @property
    def code_architecture(self) -> str:
        """Architecture for which sources are compiled; see `DeviceSpec.code_architecture`."""
        return min(self.architecture, self.device.code_architecture, key=capability_of)


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """Predicted times of a plan's programs.

    `measured_share` is the share of `train_us` that comes from measured times. `low` and `high` are the ends of a
    prediction interval, which follows from the known errors of estimates. Both equal the time if all of it was
    measured.
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
    """Predicted time and memory of a run.

    `host_gpus` and `oblivious_us` serve plans of several ranks that offload to the host or recompute; they are 0
    otherwise.

    Attributes:
        arena_bytes: Size of the arena.
        overhead_bytes: Device memory outside the arena.
        overhead_measured: Whether the overhead was measured.
        host_bytes: Pinned host memory.
        peer_bytes: Memory of another GPU.
        host_gpus: Number of GPUs of a machine that copy to its memory at the same time; the plan uses their rates.
        oblivious_us: With these rates, time of the step found by a search that ignores the other GPUs.
        links: Links between the machines of the ranks, measured, given or assumed; empty for one machine.
    """

    arena_bytes: int
    overhead_bytes: int
    overhead_measured: bool
    host_bytes: int
    peer_bytes: int = optional(0)
    host_gpus: int = optional(0)
    oblivious_us: float = optional(0.0)
    links: str = optional("")

    def bytes_of(self, space: Space) -> int:
        """Return the size of a space in bytes."""
        return {Space.ARENA: self.arena_bytes, Space.HOST: self.host_bytes, Space.PEER: self.peer_bytes}[space]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of all plans of this graph, and of the choices of this plan.

    Times are of serial schedules except `critical_path_us`: a plan with a concurrent stream may be faster.

    Attributes:
        floor_bytes: Lower bound of the arena of all plans: the states plus inputs, outputs and smallest workspace of
            the most demanding operation, or the states and inputs of a step if these are more.
        floor_operation: The most demanding operation.
        live_bytes: Peak live bytes of this plan, the lower bound of its placement.
        fastest_us: Best serial schedule: the fastest choice of kernels, divisions and layouts together, with unlimited
            workspace, for the same candidates and fused groups; for several ranks, with one sum of all gradients at the
            end.
        nondeterministic_us: `fastest_us` with kernels whose bits differ from run to run; 0 if such kernels are allowed.
        within_budget_us: No plan within the budget that runs the operations in this order is faster; 0 if not computed.
        critical_path_us: Critical-path lower bound of plans with a concurrent stream, or with collectives beside the
            kernels, for the same candidates and fused groups, undivided where this plan is; 0 if all launches run
            serially.
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
        """Lower bound of plans whose kernels run as in this plan, concurrently or serially."""
        return self.critical_path_us or max(self.fastest_us, self.within_budget_us)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: a graph, buffers with their addresses, and the launches of two programs.

    Attributes:
        version: Version of mbc.
        graph: The graph of the training step and of inference.
        target: The GPU.
        budget_bytes: Bound of arena and overhead together.
        buffers: All buffers.
        offsets: `offsets[i]` is the address of `buffers[i]` from the start of its space.
        train: The program of a training step.
        infer: The program of inference.
        predictions: Predicted time and memory.
        bounds: Lower bounds.
        host_limit_bytes: Bound of the pinned host memory; None: no bound.
        peer_limit_bytes: Bound of the memory of another GPU.
        settings: Values set by `--set NAME=VALUE` in place of those of the source; the last one of a name counts.
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
        """The settings as `depth=50, batch=64`; empty if none were set."""
        return ", ".join(f"{name}={value}" for name, value in self.settings)

    @property
    def is_timed(self) -> bool:
        """True if a GPU can run the plan, so that it has predicted times."""
        return self.graph.precision.runs_on_gpus

    @property
    def arena_budget_bytes(self) -> int:
        """Bytes that the budget leaves for the arena."""
        return self.budget_bytes - self.predictions.overhead_bytes
