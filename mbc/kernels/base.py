"""The one interface behind which kernel providers compete."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from mbc.device.spec import DeviceSpec
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a request.

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


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the launcher of a kernel reads beside its pointers, in the order that its C++ struct declares."""

    integers: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()


class Provider(Protocol):
    """A source of kernels."""

    @property
    def name(self) -> str: ...

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Every way this provider knows to run `request` on `device`, times estimated unless known better."""
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


DTYPE_CODES = {"fp32": 0, "bf16": 1, "fp16": 2, "int32": 3, "uint8": 4}  # as in templates/include/mbc_types.h
LAYOUT_CODES = {Layout.CHANNELS_FIRST: 0, Layout.CHANNELS_LAST: 1}
