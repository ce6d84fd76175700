"""The one interface behind which kernel providers compete."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Attributes
from mbc.ir.types import Layout, Precision, TensorType


@dataclass(frozen=True, slots=True)
class Request:
    """One operation as providers see it: without names, so that equal operations are asked once.

    Types are those of the slice of rows that one kernel call works on.
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

    `layouts`: of every input and then every output. `settings` end up in the plan and in the row.
    """

    provider: str
    name: str
    settings: tuple[tuple[str, int], ...]
    layouts: tuple[Layout, ...]
    workspace_bytes: int
    time_us: float
    measured: bool
    deterministic: bool = True
    accumulates: bool = False  # can add to its output instead of overwriting it
    accumulate_us: float = 0.0  # its time when it adds, where that is known apart; 0: as `time_us`

    @property
    def variant(self) -> Variant:
        """What tells it from other candidates of a request, and is the same at any number of rows."""
        return self.provider, self.name, self.settings, self.layouts


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the launcher of a kernel reads besides its pointers, in the order that its C++ struct declares."""

    integers: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call as a plan names it. `layouts`: of the inputs and then the outputs, as their buffers lie: those
    whose order does not matter are channels first."""

    request: Request
    name: str
    settings: tuple[tuple[str, int], ...]
    layouts: tuple[Layout, ...]
    accumulate: bool
    workspace_bytes: int

    @property
    def operands(self) -> tuple[TensorType, ...]:
        return (*self.request.inputs, *self.request.outputs)

    def lies_in(self, *wanted: tuple[Layout, ...]) -> bool:
        """Whether its operands lie in one of these combinations of layouts, where their order matters."""
        operands = self.operands
        return any(
            len(layouts) == len(operands)
            and all(not t.ordered or a is b for t, a, b in zip(operands, layouts, self.layouts, strict=True))
            for layouts in wanted
        )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a provider says of a call: the declaration that the search and the verifier read alike.

    `refusal`: why its kernel cannot run the call, empty where it can. `workspace_refusal`: likewise of the workspace
    alone. `proved`: that the workspace is enough follows from a formula; elsewhere the library on the GPU has to say
    it, and is asked when the module is loaded. `aligned`: operands must begin at multiples of 16 bytes.
    """

    refusal: str = ""
    workspace_refusal: str = ""
    proved: bool = True
    aligned: bool = False


class Provider(Protocol):
    """A source of kernels."""

    @property
    def name(self) -> str: ...

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Every kernel configuration that this provider has for `request` on `device`, times estimated unless known
        better."""
        ...

    def arguments(
        self,
        request: Request,
        name: str,
        settings: tuple[tuple[str, int], ...],
        layouts: tuple[Layout, ...],
        first_row: int,
        accumulate: bool,
        workspace_bytes: int,
    ) -> Arguments:
        """What the launcher `name` reads, for a slice that starts at `first_row` of the mini-batch."""
        ...

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Whether one of its kernels runs `call` on `device`: names, layouts, types, settings and workspace."""
        ...


DTYPE_CODES = {"fp32": 0, "bf16": 1, "fp16": 2, "int32": 3, "uint8": 4}  # as in templates/include/mbc_types.h
LAYOUT_CODES = {Layout.CHANNELS_FIRST: 0, Layout.CHANNELS_LAST: 1}
