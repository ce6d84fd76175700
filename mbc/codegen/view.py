"""A plan as flat rows for generated code: one row for each launch, with every decision already made.

Everything that a template writes is computed here, so that templates only loop and substitute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mbc.errors import MbcError
from mbc.hardware.streams import Space, Stream
from mbc.ir.graph import Operation
from mbc.ir.types import Precision
from mbc.kernels.base import DTYPE_CODES, Arguments, Provider
from mbc.kernels.cuda import generated_program, symbol_of
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.plan.cut import parts_of
from mbc.plan.group import title
from mbc.plan.kernel_call import call_of
from mbc.plan.model import Access, Copy, Launch, Plan, Program

STREAMS = tuple(Stream)  # in the order of the streams of mbc_create (mbc_module.h)
PEER_BASE = 1 << 62  # equal to the constant in plan_tables.h
COPY = "copy"  # the name of the launcher of copies


@dataclass(frozen=True, slots=True)
class Launcher:
    """The function that a row calls.

    `library` is one of `LIBRARIES`, which prepare their calls once; or `kernel` for mbc's own kernels, whose C function
    is `symbol` and may be shared by several kernels; or `copy`.
    """

    library: str
    name: str
    symbol: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One launch.

    Attributes:
        launcher: Index into the view's launchers.
        stream: Index into `STREAMS`.
        offsets: Bytes, one for each access: an offset into the arena; -1 - offset for host memory; PEER_BASE less than
            that for the memory of a peer.
        integers: Integers of the launch.
        reals: Floating-point numbers of the launch.
        waits: Launches of the same program that must end first.
        comment: Text that names the launch.
    """

    launcher: int
    stream: int
    offsets: tuple[int, ...]
    integers: tuple[int, ...]
    reals: tuple[float, ...]
    waits: tuple[int, ...]
    comment: str


@dataclass(frozen=True, slots=True)
class View:
    """The parts of a plan that the templates need."""

    network: str
    target: str
    architecture: str
    working: int  # MBC_WORKING: code of the working type
    arena_bytes: int
    host_bytes: int
    peer_bytes: int
    launchers: tuple[Launcher, ...]
    libraries: tuple[str, ...]  # the used ones of LIBRARIES
    train: tuple[Row, ...]
    infer: tuple[Row, ...]
    parts: Mapping[str, tuple[Row, ...]]  # of the training program, by name
    generated: tuple[MapProgram, ...] = ()  # programs of generated kernels, by name

    @property
    def uses_cudnn(self) -> bool:
        """True if the plan uses cuDNN, through either of its two APIs."""
        return not CUDNN_LIBRARIES.isdisjoint(self.libraries)

    @property
    def programs(self) -> Mapping[str, tuple[Row, ...]]:
        """The rows of each program, in the order of the programs' numbers (mbc_module.h)."""
        return {"train": self.train, "infer": self.infer, **self.parts}

    @property
    def symbols(self) -> tuple[str, ...]:
        """C functions that the kernel sources must define, each once."""
        return tuple(dict.fromkeys(launcher.symbol for launcher in self.launchers if launcher.library == "kernel"))


KERNEL_LIBRARIES = ("cudnn", "cudnn_legacy", "cublaslt")  # providers whose calls go through a library of their own
LIBRARIES = (*KERNEL_LIBRARIES, "nccl")
CUDNN_LIBRARIES = frozenset({"cudnn", "cudnn_legacy"})


def view(plan: Plan, providers: Mapping[str, Provider] | None = None) -> View:
    """Return `plan` as flat rows.

    Args:
        plan: A plan for a GPU.
        providers: Providers by name; mbc's own by default.

    Raises:
        MbcError: MBC090 if the plan cannot become GPU code.
    """
    by_name = default_providers() if providers is None else providers
    working = working_code(plan.graph.precision)
    flattener = _Flattener(plan, by_name)
    train = flattener.rows(plan.train, plan.graph.train)
    infer = flattener.rows(plan.infer, plan.graph.infer)
    parts = {name: flattener.rows(part, plan.graph.train) for name, part in parts_of(plan).items()}
    order = sorted(range(len(flattener.launchers)), key=lambda i: _sort_key(flattener.launchers[i]))
    place = {old: new for new, old in enumerate(order)}
    launchers = tuple(flattener.launchers[i] for i in order)
    used = {launcher.library for launcher in launchers}
    return View(
        network=plan.graph.name,
        target=plan.target.gpu,
        architecture=plan.target.code_architecture,
        working=working,
        arena_bytes=plan.predictions.arena_bytes,
        host_bytes=plan.predictions.host_bytes,
        peer_bytes=plan.predictions.peer_bytes,
        launchers=launchers,
        libraries=tuple(name for name in LIBRARIES if name in used),
        train=tuple(_placed(row, place) for row in train),
        infer=tuple(_placed(row, place) for row in infer),
        parts={name: tuple(_placed(row, place) for row in rows) for name, rows in parts.items()},
        generated=tuple(flattener.generated[name] for name in sorted(flattener.generated)),
    )


def working_code(precision: Precision) -> int:
    """Return the value of MBC_WORKING for kernels in `precision`; raise MBC090 if there is no GPU code for it."""
    if not precision.runs_on_gpus:
        raise MbcError(
            "MBC090",
            f"a plan in {precision} cannot become GPU code",
            "choose fp32, tf32, bf16 or fp16, or run it with device='cpu'",
        )
    return DTYPE_CODES[precision.working.value]


def default_providers() -> Mapping[str, Provider]:
    """Return all providers of mbc by name."""
    from mbc.kernels.providers import PROVIDERS  # here, because a caller with its own providers needs none of mbc's

    return {provider.name: provider for provider in PROVIDERS}


def _sort_key(launcher: Launcher) -> tuple[str, str, str]:
    return launcher.library, launcher.name, launcher.symbol


def _placed(row: Row, place: Mapping[int, int]) -> Row:
    return Row(place[row.launcher], row.stream, row.offsets, row.integers, row.reals, row.waits, row.comment)


@dataclass
class _Flattener:
    """Flattens programs, and stores shared data once: row sizes, launchers, and the arguments of equal requests."""

    plan: Plan
    providers: Mapping[str, Provider]
    launchers: list[Launcher] = field(default_factory=list[Launcher])
    generated: dict[str, MapProgram] = field(default_factory=dict[str, MapProgram])
    _launcher_numbers: dict[Launcher, int] = field(default_factory=dict[Launcher, int])
    _known_calls: dict[tuple[object, ...], tuple[Arguments, Launcher]] = field(
        default_factory=dict[tuple[object, ...], tuple[Arguments, Launcher]]
    )
    _row_bytes: dict[int, int] = field(default_factory=dict[int, int])

    def rows(self, program: Program, operations: tuple[Operation, ...]) -> list[Row]:
        """Return one row for each launch of a program, in order."""
        by_name = {operation.name: operation for operation in operations}
        waits: dict[int, list[int]] = {}
        for earlier, later in program.waits:
            waits.setdefault(later, []).append(earlier)
        return [
            self._row(launch, by_name, tuple(sorted(waits.get(i, ())))) for i, launch in enumerate(program.launches)
        ]

    def _row(self, launch: Launch, operations: Mapping[str, Operation], waits: tuple[int, ...]) -> Row:
        arguments, launcher = self._call(launch, operations)
        number = self._launcher_numbers.get(launcher)
        if number is None:
            number = self._launcher_numbers[launcher] = len(self.launchers)
            self.launchers.append(launcher)
        return Row(
            number,
            STREAMS.index(launch.stream),
            tuple(self._offset(access) for access in launch.accesses),
            arguments.integers,
            arguments.reals,
            waits,
            self._comment(launch),
        )

    def _call(self, launch: Launch, operations: Mapping[str, Operation]) -> tuple[Arguments, Launcher]:
        if isinstance(launch.work, Copy):
            access = launch.accesses[0]
            return Arguments((access.rows.count * self._bytes_per_row(access.buffer),)), Launcher(COPY, COPY)
        provider, call = launch.work.provider, call_of(self.plan, launch, operations)
        first_row = max(
            (a.rows.start for a in launch.accesses if self.plan.buffers[a.buffer].value is not None), default=0
        )
        key = (provider, call, first_row)
        if key not in self._known_calls:
            arguments = self.providers[provider].arguments(call, first_row)
            library = provider if provider in LIBRARIES else "kernel"
            launcher = Launcher(library, call.name, symbol_of(provider, call.name, call.request))
            self._known_calls[key] = arguments, launcher
            program = generated_program(provider, call.name, call.request)
            if program is not None:
                self.generated[program.name] = program
        return self._known_calls[key]

    def _bytes_per_row(self, number: int) -> int:
        row_bytes = self._row_bytes.get(number)
        if row_bytes is None:
            buffer = self.plan.buffers[number]
            row_bytes = self._row_bytes[number] = buffer.size_bytes // max(buffer.rows.count, 1)
        return row_bytes

    def _offset(self, access: Access) -> int:
        buffer = self.plan.buffers[access.buffer]
        start = access.rows.start - buffer.rows.start
        skipped = start * self._bytes_per_row(access.buffer) if start else 0
        offset = self.plan.offsets[access.buffer] + skipped
        if buffer.space is Space.ARENA:
            return offset
        return -1 - offset - (PEER_BASE if buffer.space is Space.PEER else 0)

    def _comment(self, launch: Launch) -> str:
        """Return operations, kernel and rows, which name the launch in messages and in the generated code."""
        if isinstance(launch.work, Copy):
            what = "copy"
        else:
            settings = " ".join(f"{name}={value}" for name, value in launch.work.settings)
            what = f"{launch.work.provider} {launch.work.name}{' ' + settings if settings else ''}"
        named = title(launch.operations)
        if not named:
            named = self.plan.buffers[launch.accesses[0].buffer].value or "workspace"
        widest = max((a.rows for a in launch.accesses), key=lambda rows: rows.count)
        rows = f" rows {widest.start}..{widest.stop}" if widest.count > 1 else ""
        return f"{named} ({what}){rows}"
