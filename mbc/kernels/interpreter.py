"""The provider `interpreter`, of plans that only the interpreter runs (fp64): any operation, no workspace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Acceptance, Arguments, Call, Candidate, Request
from mbc.ops.fused import SEPARATOR, SEVERAL


@dataclass(frozen=True)
class Interpreter:
    """One candidate for every request, channels first."""

    name: str = "interpreter"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Yield one candidate, whose time is that of moving its operands once."""
        operands = (*request.inputs, *request.outputs)
        # Bytes moved are enough to compare two plans, and the time is marked as an estimate.
        time_us = sum(t.size_bytes for t in operands) / (device.copy_gb_s * 1e3) + device.launch_us
        yield Candidate(
            self.name,
            _name(request),
            (),
            (Layout.CHANNELS_FIRST,) * len(operands),
            0,
            time_us,
            measured=False,
            accumulates=True,
        )

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Accept any operation without settings whose operands are all channels first."""
        if call.name != _name(call.request) or call.settings:
            return Acceptance(f"the interpreter runs {call.request.kind} only as '{_name(call.request)}'")
        if Layout.CHANNELS_LAST in call.layouts:
            return Acceptance("it does not take operands in the layout nhwc")
        return Acceptance()

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return no arguments: the interpreter reads the operation itself."""
        return Arguments()


def _name(request: Request) -> str:
    return request.kind.replace(SEPARATOR, "_").replace(SEVERAL, "s")


INTERPRETER = Interpreter()
