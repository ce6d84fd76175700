"""Libraries of generated kernels, which are compiled and loaded when somebody measures them."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mbc.codegen.build import build_generated_library
from mbc.codegen.toolchain import find_toolchain
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.kernels.cuda.generated.map_program import MapProgram

# Compiles and links a library of some programs at a path.
Build = Callable[[Sequence[MapProgram], Path], None]


class GeneratedLibraries:
    """The generated kernels of one architecture and one precision's working type."""

    def __init__(self, build: Build) -> None:
        """Load libraries that `build` makes."""
        self._build = build
        self._functions: dict[str, Any] = {}
        self._libraries: list[ctypes.CDLL] = []
        self._multiprocessors = 0

    @staticmethod
    def of(architecture: str, precision: Precision) -> GeneratedLibraries:
        """Return the kernels of an architecture and a precision."""

        def build(programs: Sequence[MapProgram], path: Path) -> None:
            build_generated_library(architecture, precision, programs, path, find_toolchain())

        return GeneratedLibraries(build)

    def add(self, programs: Iterable[MapProgram]) -> None:
        """Compile those kernels that are not loaded yet, in parallel, and load them.

        Raises:
            MbcError: MBC095, a compiler rejects a source; MBC096, a compiler is missing; MBC097, the library does not
                load.
        """
        missing = {program.symbol: program for program in programs if program.symbol not in self._functions}
        if not missing:
            return
        with tempfile.TemporaryDirectory(prefix="mbc-generated-") as folder:
            path = Path(folder) / "libgenerated.so"
            self._build(tuple(missing.values()), path)
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                raise MbcError("MBC097", f"generated kernels do not load: {error}", "run `mbc doctor`") from error
        self._libraries.append(library)
        self._functions |= {symbol: getattr(library, symbol) for symbol in missing}
        library.mbc_set_multiprocessors(ctypes.c_int64(self._multiprocessors))

    def limit(self, multiprocessors: int) -> None:
        """Size launches for a number of multiprocessors; 0 for all of the GPU's."""
        self._multiprocessors = multiprocessors
        for library in self._libraries:
            library.mbc_set_multiprocessors(ctypes.c_int64(multiprocessors))

    def function(self, program: MapProgram) -> Any:
        """Return the launcher of a kernel, which is compiled if it is not loaded yet; see `add`."""
        self.add((program,))
        return self._functions[program.symbol]
