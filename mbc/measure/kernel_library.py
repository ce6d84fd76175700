"""Runs any candidate of any provider on a GPU, through the same code as a generated module.

One shared library holds every kernel of mbc and every library that plans call (templates/kernel_library.cpp.j2), for
one architecture and one working type. Measurements through it hold for modules with the same candidates.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mbc.codegen.build import build_kernel_library
from mbc.codegen.toolchain import find_toolchain
from mbc.codegen.view import KERNEL_LIBRARIES, default_providers
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.cuda import generated_program, symbol_of
from mbc.measure.generated_libraries import GeneratedLibraries
from mbc.measure.gpu import Gpu

COMPARING = ("convert", "cast", "mse")  # kernels that compare results (mbc/measure/compare.py)


class MbcCall(ctypes.Structure):
    """The struct of templates/include/mbc_call.h."""

    _fields_ = (
        ("pointers", ctypes.POINTER(ctypes.c_void_p)),
        ("integers", ctypes.POINTER(ctypes.c_int64)),
        ("reals", ctypes.POINTER(ctypes.c_double)),
        ("stream", ctypes.c_void_p),
        ("pointer_count", ctypes.c_int64),
        ("integer_count", ctypes.c_int64),
    )


class Call:
    """One launch that can be enqueued any number of times, until its library is cleared or closed."""

    def __init__(self, function: Any, leading: tuple[Any, ...], call: MbcCall, what: str) -> None:
        """Store the launcher, its `leading` arguments and the call; `what` names the kernel in messages."""
        self._function = function
        self._leading = leading
        self._call = call  # keeps the arrays that it points to alive
        self._what = what

    def enqueue(self) -> None:
        """Enqueue the launch on the library's stream; a graph can capture it.

        Raises:
            MbcError: MBC098, the launcher refuses.
        """
        text = self._function(*self._leading, ctypes.byref(self._call))
        if text is not None:
            raise MbcError("MBC098", f"the launch of {self._what} failed: {text.decode(errors='replace')}")


class KernelLibrary:
    """The kernels and libraries of one architecture and one precision's working type, on one stream.

    Plans and handles that `prepare` creates live until `clear` or `close`.
    """

    def __init__(self, path: Path, stream: int, providers: Mapping[str, Provider] | None = None) -> None:
        """Load the built library at `path`.

        Args:
            path: The shared library.
            stream: Handle of a stream of the current context.
            providers: Providers by name; None for all of mbc's.

        Raises:
            MbcError: MBC097, the library does not load.
        """
        try:
            self._calls = calls = ctypes.CDLL(str(path))
        except OSError as error:
            raise MbcError("MBC097", f"the library of kernels does not load: {error}", "run `mbc doctor`") from error
        calls.mbc_kernels_open.restype = ctypes.c_void_p
        calls.mbc_kernels_close.restype = None
        calls.mbc_kernels_close.argtypes = (ctypes.c_void_p,)
        calls.mbc_kernels_clear.restype = None
        calls.mbc_kernels_clear.argtypes = (ctypes.c_void_p,)
        integers = ctypes.POINTER(ctypes.c_int64)
        calls.mbc_kernels_prepare.restype = ctypes.c_char_p
        calls.mbc_kernels_prepare.argtypes = (
            ctypes.c_void_p, ctypes.c_int, integers, ctypes.c_int64, integers, ctypes.c_int64,
            ctypes.POINTER(ctypes.c_int),
        )  # fmt: skip
        calls.mbc_kernels_run.restype = ctypes.c_char_p
        calls.mbc_kernels_run.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(MbcCall))
        self._stream = stream
        self._providers = default_providers() if providers is None else providers
        self._opened: int | None = calls.mbc_kernels_open()
        self.generated: GeneratedLibraries | None = None

    @staticmethod
    def open(gpu: Gpu, precision: Precision, kernels: Sequence[str] | None = None) -> KernelLibrary:
        """Build the library, from the cache where possible, and load it.

        Args:
            gpu: The GPU.
            precision: Precision whose working type the kernels have.
            kernels: Kernels whose sources are compiled, beside those that compare results; None for all.

        Raises:
            MbcError: MBC090, the precision is fp64; MBC095, a compiler rejects the sources; MBC096, a compiler or a
                library is missing; MBC097, the result does not load.
        """
        with tempfile.TemporaryDirectory(prefix="mbc-kernels-") as folder:
            path = Path(folder) / "libkernels.so"
            wanted = None if kernels is None else (*kernels, *COMPARING)
            build_kernel_library(gpu.code_architecture, precision, path, find_toolchain(), wanted)
            library = KernelLibrary(path, gpu.stream_handle.value or 0)  # once loaded, it does not need its file
            library.generated = GeneratedLibraries.of(gpu.code_architecture, precision)
            library.limit(gpu.part)
            return library

    def limit(self, multiprocessors: int | None) -> None:
        """Size launches for `multiprocessors` multiprocessors; None for all of the GPU's."""
        self._calls.mbc_set_multiprocessors(ctypes.c_int64(multiprocessors or 0))
        if self.generated is not None:
            self.generated.limit(multiprocessors or 0)

    def prepare(
        self,
        candidate: Candidate,
        request: Request,
        pointers: Sequence[int],
        workspace: int,
        accumulate: bool = False,
        first_row: int = 0,
    ) -> Call:
        """Prepare a launch of `candidate` for `request`.

        A change of layout or type is a request of kind `convert`.

        Args:
            candidate: The kernel, its settings and layouts.
            request: The operation with its shapes.
            pointers: Device addresses of the inputs, then the outputs.
            workspace: Address of `candidate.workspace_bytes` bytes; ignored if the candidate needs none.
            accumulate: Add to the output.
            first_row: Row of the mini-batch at which the operands start.

        Raises:
            MbcError: MBC086, the library refuses; the message is the library's. For a generated kernel also those of
                `GeneratedLibraries.add`.
        """
        arguments = self._providers[candidate.provider].arguments(candidate.call(request, accumulate), first_row)
        addresses = (*pointers, workspace) if candidate.workspace_bytes > 0 else tuple(pointers)
        integers = (ctypes.c_int64 * max(1, len(arguments.integers)))(*arguments.integers)
        call = MbcCall(
            (ctypes.c_void_p * max(1, len(addresses)))(*addresses),
            integers,
            (ctypes.c_double * max(1, len(arguments.reals)))(*arguments.reals),
            self._stream,
            len(addresses),
            len(arguments.integers),
        )
        what = f"{candidate.provider} {candidate.name}"
        if candidate.provider not in KERNEL_LIBRARIES:
            return Call(self._launcher(candidate, request), (), call, what)
        library = KERNEL_LIBRARIES.index(candidate.provider)
        number = ctypes.c_int()
        text = self._calls.mbc_kernels_prepare(
            self._opened,
            library,
            integers,
            len(arguments.integers),
            (ctypes.c_int64 * len(addresses))(*addresses),
            len(addresses),
            ctypes.byref(number),
        )
        if text is not None:
            raise MbcError("MBC086", f"{what}: {text.decode(errors='replace')}")
        return Call(self._calls.mbc_kernels_run, (self._opened, library, number), call, what)

    def _launcher(self, candidate: Candidate, request: Request) -> Any:
        name = candidate.name
        program = generated_program(candidate.provider, name, request)
        try:
            if program is not None and self.generated is not None:
                function = self.generated.function(program)
            else:
                function = getattr(self._calls, symbol_of(candidate.provider, name, request))
        except AttributeError:
            raise MbcError("MBC086", f"mbc has no kernel called {name}", "measure again with this version") from None
        function.restype = ctypes.c_char_p
        function.argtypes = (ctypes.POINTER(MbcCall),)
        return function

    def clear(self) -> None:
        """Free everything prepared so far, because plans of very many candidates would fill the memory.

        The stream must be idle. Calls and graphs that use them are no longer valid.
        """
        self._calls.mbc_kernels_clear(self._opened)

    def close(self) -> None:
        """Close the library."""
        if self._opened is not None:
            self._calls.mbc_kernels_close(self._opened)
            self._opened = None

    def __enter__(self) -> KernelLibrary:
        """Return this library."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the library."""
        self.close()
