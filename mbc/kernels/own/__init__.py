"""The provider `mbc`: the project's own CUDA kernels, whose sources are templates/kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mbc.device.spec import DeviceSpec
from mbc.errors import MbcError
from mbc.ir.types import DType, Precision
from mbc.kernels.base import Arguments, Candidate, Request
from mbc.kernels.own import channels, elementwise, images, losses, moves, products, updates
from mbc.kernels.own.base import Layouts, OwnKernel, Slice, layout_of
from mbc.kernels.own.moves import ConvertArguments, conversion

_FAMILIES = (elementwise, channels, images, moves, losses, updates, products)

KERNELS: Mapping[str, OwnKernel] = MappingProxyType(
    {kernel.kind: kernel for family in _FAMILIES for kernel in family.KERNELS}
)


@dataclass(frozen=True)
class Own:
    """One candidate for every combination of layouts that a kernel takes. All are deterministic."""

    name: str = "mbc"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Nothing for what has no kernel, and for fp64, which runs in the interpreter only."""
        kernel = KERNELS.get(request.kind)
        operands = (*request.inputs, *request.outputs)
        if kernel is None or request.precision is Precision.FP64 or any(t.dtype is DType.FP64 for t in operands):
            return
        for layouts in kernel.layouts(request):
            workspace_bytes = kernel.workspace(request, layout_of(request, layouts))
            launches = kernel.launches if kernel.launches == 1 or workspace_bytes else 1
            yield Candidate(
                provider=self.name,
                name=request.kind,
                settings=(),
                layouts=layouts,
                workspace_bytes=workspace_bytes,
                time_us=kernel.time_us(request, device) + launches * device.launch_us,
                measured=False,
                accumulates=kernel.accumulates,
            )

    def arguments(
        self,
        request: Request,
        name: str,
        settings: tuple[tuple[str, int], ...],
        layouts: Layouts,
        first_row: int,
        accumulate: bool,
        workspace_bytes: int,
    ) -> Arguments:
        """The launcher's structure. MBC080 for an unknown kernel, MBC081 for too little workspace, MBC082 where a
        kernel that only overwrites is to add: all three say that a plan was not made by this version."""
        kernel = KERNELS.get(name)
        if kernel is None:
            raise MbcError("MBC080", f"this mbc has no kernel called '{name}'", "compile the source again")
        layout = layout_of(request, layouts)
        needed_bytes = kernel.workspace(request, layout)
        if workspace_bytes < needed_bytes:
            raise MbcError(
                "MBC081",
                f"kernel '{name}' needs {needed_bytes} bytes of workspace, the plan gives it {workspace_bytes}",
                "compile the source again",
            )
        if accumulate and not kernel.accumulates:
            raise MbcError("MBC082", f"kernel '{name}' cannot add to its output", "compile the source again")
        at = Slice(request, layout, first_row, accumulate)
        struct = conversion(request, layouts) if kernel.struct is ConvertArguments else kernel.integers(at)
        return Arguments(struct.integers() + kernel.more(at), kernel.reals(at))


OWN = Own()
