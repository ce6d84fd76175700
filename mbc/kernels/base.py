"""The interface of kernel providers: requests, candidates, calls, and which calls a provider accepts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Attributes
from mbc.ir.types import Layout, Precision, TensorType


@dataclass(frozen=True, slots=True)
class Request:
    """One operation as providers see it. It has no names, so that equal operations are equal requests.

    Types are those of the rows of one kernel call.
    """

    kind: str
    attributes: Attributes
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    precision: Precision


Variant = tuple[str, str, tuple[tuple[str, int], ...], tuple[Layout, ...]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel configuration that can run a request.

    Attributes:
        provider: Name of the provider.
        name: Name of the kernel, unique among the provider's kernels.
        settings: Settings of the kernel, which are written to the plan and to the launch's arguments.
        layouts: Layouts of the inputs, then of the outputs.
        workspace_bytes: Workspace that the kernel needs.
        time_us: Time of one call, measured or estimated.
        measured: Whether `time_us` was measured.
        deterministic: Whether equal inputs give equal bits.
        accumulates: Whether the kernel can add to its output instead of overwriting it.
        accumulate_us: Time of a call that adds to its output; 0: `time_us` holds for such calls, too.
        by_measurement: Whether the search may choose the kernel only by a measured time (`OwnKernel.by_measurement`).
    """

    provider: str
    name: str
    settings: tuple[tuple[str, int], ...]
    layouts: tuple[Layout, ...]
    workspace_bytes: int
    time_us: float
    measured: bool
    deterministic: bool = True
    accumulates: bool = False
    accumulate_us: float = 0.0
    by_measurement: bool = False

    @property
    def variant(self) -> Variant:
        """Provider, name, settings and layouts: the identity of a candidate, independent of the number of rows."""
        return self.provider, self.name, self.settings, self.layouts

    def call(self, request: Request, accumulate: bool = False) -> Call:
        """Return the call of this candidate for `request`, which may be of other rows than the candidate's."""
        return Call(request, self.name, self.settings, self.layouts, accumulate, self.workspace_bytes)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Numbers that a kernel's launcher reads besides pointers, in the order of its C++ struct."""

    integers: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call as a plan names it.

    `layouts` holds the layouts of the inputs, then of the outputs. An operand whose elements have the same order in
    both layouts counts as channels first.
    """

    request: Request
    name: str
    settings: tuple[tuple[str, int], ...]
    layouts: tuple[Layout, ...]
    accumulate: bool
    workspace_bytes: int

    @property
    def operands(self) -> tuple[TensorType, ...]:
        """Types of the inputs, then of the outputs."""
        return (*self.request.inputs, *self.request.outputs)

    def has_layouts(self, *wanted: tuple[Layout, ...]) -> bool:
        """Return whether the operands have one of these combinations of layouts, where the layout matters."""
        operands = self.operands
        return any(
            len(layouts) == len(operands)
            and all(not t.ordered or a is b for t, a, b in zip(operands, layouts, self.layouts, strict=True))
            for layouts in wanted
        )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A provider's answer to a call, which both the search and the verifier read.

    Attributes:
        refusal: Why the kernel cannot run the call; empty if it can.
        workspace_refusal: Why the workspace does not fit the kernel; empty if it does.
        proved: Whether a formula proves that the workspace is enough. Otherwise the library checks it on the GPU when
            the module is loaded.
        aligned: Whether operands must begin at multiples of 16 bytes.
    """

    refusal: str = ""
    workspace_refusal: str = ""
    proved: bool = True
    aligned: bool = False


class Provider(Protocol):
    """A source of kernels."""

    @property
    def name(self) -> str:
        """Name of the provider in plans and profiles."""
        ...

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Return every kernel configuration that this provider has for `request` on `device`.

        Times are estimates unless a measurement exists.
        """
        ...

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return the numbers that the launcher of a call reads, for a slice that starts at row `first_row`."""
        ...

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Return whether a kernel of this provider runs `call` on `device`, and why not if it does not.

        The answer depends on names, layouts, types, settings and workspace.
        """
        ...


DTYPE_CODES = {"fp32": 0, "bf16": 1, "fp16": 2, "int32": 3, "uint8": 4}
LAYOUT_CODES = {Layout.CHANNELS_FIRST: 0, Layout.CHANNELS_LAST: 1}
