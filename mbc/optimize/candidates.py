"""What could run each operation: every provider's candidates, asked once per distinct request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mbc.device.profile import Profile
from mbc.device.spec import DeviceSpec
from mbc.errors import MbcError
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout, TensorType, layout_matters
from mbc.kernels.base import Candidate, Provider, Request
from mbc.plan.model import Rows


@dataclass(frozen=True, slots=True)
class Limits:
    """What a candidate must keep to."""

    workspace_bytes: int
    deterministic: bool


@dataclass
class CandidateTable:
    """Candidates of the operations of one graph on one device.

    The answers are the same for equal requests, so a deep network of few distinct layers costs little.
    """

    graph: TrainingGraph
    device: DeviceSpec
    providers: tuple[Provider, ...]
    profile: Profile | None = None
    _known: dict[Request, tuple[Candidate, ...]] = field(default_factory=dict[Request, tuple[Candidate, ...]])

    def slice_type(self, name: str, rows: Rows) -> TensorType:
        """Type of the part of a value that a launch over `rows` touches."""
        value = self.graph.values[name]
        return value.type.with_rows(rows.count) if value.per_sample else value.type

    def request(self, operation: Operation, rows: Rows) -> Request:
        return Request(
            operation.kind,
            operation.attributes,
            tuple(self.slice_type(name, rows) for name in operation.inputs),
            tuple(self.slice_type(name, rows) for name in operation.outputs),
            self.graph.precision,
        )

    def all(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Every candidate, the measured ones of a profile in place of the same ones estimated."""
        request = self.request(operation, rows)
        known = self._known.get(request)
        if known is None:
            measured = self.profile.candidates(request) if self.profile else ()
            providers = {candidate.provider for candidate in measured}
            estimated = (c for p in self.providers for c in p.candidates(request, self.device))
            # What a profile has of a provider is all that counts of it: an optimistic estimate must not beat a fact.
            offered = (*measured, *(c for c in estimated if c.provider not in providers))
            known = tuple(_with_plain_layouts(c, request) for c in offered)
            self._known[request] = known
        if not known:
            inputs = ", ".join(map(str, request.inputs))
            raise MbcError(
                "MBC200",
                f"no kernel can run '{operation.name}' ({operation.kind} of {inputs}) in {self.graph.precision}",
                "choose another precision, or write the operation with other settings",
                operation.span,
            )
        return known

    def admitted(self, operation: Operation, rows: Rows, limits: Limits) -> tuple[Candidate, ...]:
        """The candidates within the limits; MBC201 says what would do where there is none."""
        known = self.all(operation, rows)
        within = tuple(c for c in known if c.workspace_bytes <= limits.workspace_bytes)
        admitted = tuple(c for c in within if c.deterministic or not limits.deterministic)
        if admitted:
            return admitted
        if within:
            raise MbcError(
                "MBC202",
                f"'{operation.name}' has no deterministic kernel within {limits.workspace_bytes} bytes of workspace",
                "raise --workspace-limit, or set deterministic = false",
                operation.span,
            )
        least = min(c.workspace_bytes for c in known)
        raise MbcError(
            "MBC201",
            f"'{operation.name}' needs {least} bytes of workspace, the limit is {limits.workspace_bytes}",
            f"raise --workspace-limit to at least {least}",
            operation.span,
        )


def _with_plain_layouts(candidate: Candidate, request: Request) -> Candidate:
    """Operands whose layout does not matter are CHANNELS_FIRST, so that nothing is converted for their sake."""
    types = (*request.inputs, *request.outputs)
    layouts = tuple(
        layout if layout_matters(type_.shape) else Layout.CHANNELS_FIRST
        for layout, type_ in zip(candidate.layouts, types, strict=True)
    )
    return replace(candidate, layouts=layouts)


def conversion_us(type_: TensorType, device: DeviceSpec) -> float:
    """Estimated time of one layout conversion: every byte read and written once."""
    return 2 * type_.size_bytes / (device.copy_gb_s * 1e3) + device.launch_us
