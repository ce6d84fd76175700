"""The provider `mbc`: the project's own CUDA kernels, whose sources are in templates/kernels.

* `base`: the declaration of a kernel of this provider
* `image`: what structures of launches over images begin with
* `wiring`: how a kernel recognizes its fusion group
* `strided`: extents and strides of operands of any rank
* `pointwise`: losses, conversions, data movement
* `norm`: batch normalization and reductions over channels
* `pool`: pooling
* `conv`: convolutions and their fusions
* `attention`: scaled dot-product attention
* `fp32_emulated`: fp32 by three fp16 tensor-core products
* `fused`: fused operations of batch normalization, ReLU and concatenation
* `generated`: kernels that are generated for pointwise operations and groups of them
* `update`: the optimizer and multi-tensor launches
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType

from mbc.errors import MbcError
from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Precision
from mbc.kernels.base import Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.calibration import Effort, calibration, estimate_us
from mbc.kernels.cuda.base import PROVIDER, OwnKernel, Slice, effort_of, layout_of
from mbc.kernels.cuda.base import Layouts as Layouts
from mbc.kernels.cuda.generated.generated_map import generated_kernel
from mbc.kernels.cuda.generated.lowering import lower
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.kernels.cuda.pointwise.move import ConvertArguments, conversion
from mbc.ops.fused import Fused


def _kernels() -> Iterator[OwnKernel]:
    """Yield the kernels of every file below, in the order of the files' names.

    The first of equally fast kernels is chosen, so the order must not be that of a file system.
    """
    files = sorted(info.name for info in pkgutil.walk_packages(__path__, f"{__name__}.") if not info.ispkg)
    for name in files:
        yield from getattr(importlib.import_module(name), "KERNELS", ())


# Kernels by their names in candidates. A kind may have several kernels.
KERNELS: Mapping[str, OwnKernel] = MappingProxyType({kernel.name: kernel for kernel in _kernels()})

_BY_KIND: Mapping[str, tuple[OwnKernel, ...]] = MappingProxyType(
    {kind: tuple(k for k in KERNELS.values() if k.kind == kind) for kind in {k.kind for k in KERNELS.values()}}
)


@dataclass(frozen=True)
class Own:
    """The provider `mbc`: a candidate for every kernel of a kind and every combination of its layouts."""

    name: str = PROVIDER

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Return the candidates of a request; none if no kernel takes it or if it is in fp64.

        Only the interpreter runs fp64.
        """
        return (candidate for candidate, _ in self.estimated(request, device))

    def estimated(self, request: Request, device: DeviceSpec) -> Iterable[tuple[Candidate, Effort]]:
        """Yield each candidate with the effort that its time was estimated from."""
        operands = (*request.inputs, *request.outputs)
        if request.precision is Precision.FP64 or any(t.dtype is DType.FP64 for t in operands):
            return
        for kernel in _kernels_of(request):
            is_superseded = kernel.superseded_by is not None and device.has(kernel.superseded_by)
            if not _able(device, kernel) or not kernel.offered(request) or _lacks_shared(device, kernel, request):
                continue
            if is_superseded and not kernel.measured_anyway(request):
                continue
            for layouts in kernel.layouts(request):
                workspace_bytes = kernel.workspace(request, layout_of(request, layouts))
                effort = effort_of(kernel, request, layouts, device)
                candidate = Candidate(
                    provider=self.name,
                    name=kernel.name,
                    settings=kernel.settings,
                    layouts=layouts,
                    workspace_bytes=workspace_bytes,
                    time_us=estimate_us(effort),
                    measured=False,
                    accumulates=kernel.accumulates,
                    by_measurement=kernel.by_measurement or is_superseded,
                )
                yield candidate, effort

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Return whether the declaration of the named kernel allows the call.

        The workspace must have at least the bytes of the kernel's formula.
        """
        kernel = kernel_of(call.name, call.request)
        if kernel is None:
            return Acceptance(f"mbc has no kernel called '{call.name}'")
        if not _able(device, kernel):
            return Acceptance(f"{device.architecture} lacks instructions that it needs")
        if refusal := kernel.refusal(call):
            return Acceptance(refusal)
        if _lacks_shared(device, kernel, call.request):
            return Acceptance(f"a block of {device.architecture} has less shared memory than it needs")
        needed_bytes = kernel.workspace(call.request, layout_of(call.request, call.layouts))
        if call.workspace_bytes < needed_bytes:
            return Acceptance(workspace_refusal=f"it needs {needed_bytes} bytes")
        return Acceptance(aligned=kernel.aligned)

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return the numbers of the launcher's structure.

        Raises:
            MbcError: MBC080 for an unknown kernel; MBC081 if the workspace is too small; MBC082 if a kernel that only
                overwrites is asked to add. All three mean that another version of mbc wrote the plan.
        """
        request = call.request
        kernel = kernel_of(call.name, request)
        if kernel is None:
            raise MbcError("MBC080", f"this mbc has no kernel called '{call.name}'", "compile the source again")
        layout = layout_of(request, call.layouts)
        needed_bytes = kernel.workspace(request, layout)
        if call.workspace_bytes < needed_bytes:
            raise MbcError(
                "MBC081",
                f"kernel '{call.name}' needs {needed_bytes} bytes of workspace, "
                f"the plan gives it {call.workspace_bytes}",
                "compile the source again",
            )
        if call.accumulate and not kernel.accumulates:
            raise MbcError("MBC082", f"kernel '{call.name}' cannot add to its output", "compile the source again")
        at = Slice(request, layout, first_row, call.accumulate)
        struct = conversion(request, call.layouts) if kernel.struct is ConvertArguments else kernel.integers(at)
        return Arguments(struct.integers() + kernel.trailing(at), kernel.reals(at))


def kernel_of(name: str, request: Request) -> OwnKernel | None:
    """Return the kernel called `name`, which may be generated for the request; None if there is none."""
    kernel = KERNELS.get(name)
    if kernel is None:
        generated = generated_kernel(request)
        kernel = generated if generated is not None and generated.name == name else None
    return kernel


def generated_program(provider: str, name: str, request: Request) -> MapProgram | None:
    """Return the program of a kernel that is generated for a request; None for a kernel whose source is a file."""
    kernel = KERNELS.get(name)
    if provider != PROVIDER or (kernel is not None and kernel.file):
        return None
    lowered = lower(request)
    return lowered.program if lowered is not None and (kernel is not None or lowered.program.name == name) else None


def programs_of(request: Request) -> Iterable[MapProgram]:
    """Yield the programs of the generated kernels that take a request."""
    for kernel in _kernels_of(request):
        program = generated_program(PROVIDER, kernel.name, request)
        if program is not None:
            yield program


def symbol_of(provider: str, name: str, request: Request) -> str:
    """Return the C function that launches a kernel for a request."""
    program = generated_program(provider, name, request)
    if program is not None:
        return program.symbol
    kernel = KERNELS.get(name)
    return kernel.symbol(request) if kernel else f"mbc_{name}"


def _kernels_of(request: Request) -> Iterable[OwnKernel]:
    """Return the kernels that take a request: those of its kind, else one that is generated.

    A single operation whose kind has kernels gets no other one.
    """
    kernels = [kernel for kernel in _BY_KIND.get(request.kind, ()) if kernel.runs(request)]
    if kernels or (request.kind in _BY_KIND and not isinstance(request.attributes, Fused)):
        return kernels
    generated = generated_kernel(request)
    return (generated,) if generated is not None and generated.runs(request) else ()


def bitwise_equal_to(name: str, other: str) -> bool:
    """Return whether the kernel `name` recomputes the result of the kernel `other` to the bit."""
    kernel = KERNELS.get(name)
    return kernel is None or not kernel.bitwise_equal_to or other in kernel.bitwise_equal_to


def uses_tensor_cores(name: str) -> bool:
    """Return whether the kernel called `name` multiplies by instructions of tensor cores that not every GPU has."""
    kernel = KERNELS.get(name)
    return kernel is not None and kernel.needs in (Instruction.MMA_SYNC, Instruction.WGMMA)


def is_calibrated(name: str) -> bool:
    """Return whether the kernel called `name` is of a family (`Effort.family`), and shares were fitted to it."""
    kernel = KERNELS.get(name)
    return kernel is not None and kernel.arithmetic_us is not None and f"{PROVIDER} {name}" in calibration().shares


def without_statistics(name: str) -> str:
    """Return the kernel that computes the result of `name` to the bit, but no statistics; empty if there is none."""
    kernel = KERNELS.get(name)
    return kernel.without_statistics if kernel else ""


# Names of the sources with instructions (wgmma) that only one architecture has.
WGMMA_SOURCES = frozenset(
    PurePosixPath(file).name
    for kernel in KERNELS.values()
    if kernel.needs is Instruction.WGMMA
    for file in kernel.files
)


def symbols_of(names: Iterable[str]) -> list[str]:
    """Return the C functions that launch the kernels of these names for any request."""
    return [launcher.symbol for name in names for launcher in KERNELS[name].launchers]


def emulates_fp32(provider: str, name: str, precision: Precision = Precision.FP32) -> bool:
    """Return whether the kernel computes each fp32 product by several products of a shorter type.

    In tf32 the same kernel computes one product, and the answer is False.
    """
    kernel = KERNELS.get(name) if provider == PROVIDER and precision is Precision.FP32 else None
    return kernel is not None and kernel.emulates_fp32


def _lacks_shared(device: DeviceSpec, kernel: OwnKernel, request: Request) -> bool:
    return kernel.shared(request) > device.shared_bytes_of_block


def _able(device: DeviceSpec, kernel: OwnKernel) -> bool:
    return kernel.needs is None or device.has(kernel.needs)


OWN = Own()
