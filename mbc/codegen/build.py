"""Writes a package, whole or not at all: the plan, its sources, the Python module and the compiled library."""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from mbc.codegen.launch_headers import write_launch_headers
from mbc.codegen.objects import Recipe, make_library
from mbc.codegen.render_sources import (
    every_kernel_file,
    files_defining,
    kernel_files,
    render,
    render_generated,
    render_kernel_library,
    render_module,
)
from mbc.codegen.staging import NEW, OLD, clear, swap, temporary_folder
from mbc.codegen.toolchain import CUBLASLT, CUDART, CUDNN, GXX, NVCC, Missing, Part, Toolchain
from mbc.codegen.view import CUDNN_LIBRARIES, KERNEL_LIBRARIES, View, view, working_code
from mbc.errors import MbcError
from mbc.hardware.spec import is_plan_only
from mbc.ir.types import Precision
from mbc.kernels.cuda import symbols_of
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.plan.file import PLAN_FILE, dump_plan, rank_folder
from mbc.plan.model import Plan
from mbc.resources import folder as resource_folder

LIBRARY = "libmodule.so"
SOURCES = "source"
KERNEL_LIBRARY_SOURCE = "kernel_library.cpp"
GENERATED_LIBRARY_SOURCE = "generated_library.cpp"
PLAN_ONLY = Missing(
    "code for this GPU",
    "plan only: the CUDA toolkit generates no code for a GPU this old",
    "read the plan with mbc show, compare it with mbc diff, or plan for a newer GPU (mbc gpus lists them)",
)
# Names that a package must not have, installed here or not, because packages are moved to other machines.
_NEEDED = frozenset({"mbc", "numpy", "pycuda", "torch", "jax"})
MARKER = ".mbc-package"  # mbc may replace a folder that holds this file

_HOST_FILES = {
    "nccl": ("nccl.cpp",),
    "cudnn": ("cudnn_calls.cpp", "convolution.cpp"),
    "cudnn_legacy": ("cudnn_calls.cpp", "legacy_convolution.cpp"),
    "cublaslt": ("cublaslt.cpp",),
}


@dataclass(frozen=True, slots=True)
class Package:
    """A package that was written.

    `library` is None if the library could not be built, and `missing` says why: the module then runs on the CPU.
    """

    folder: Path
    library: Path | None
    missing: tuple[Missing, ...]


def write_package(plans: Sequence[Plan], folder: Path, toolchain: Toolchain, overwrite: bool = False) -> Package:
    """Write a plan as the importable package `folder` and build its library if the toolchain can.

    Ranks whose plan differs from the first one get a package inside (`rank_folder`). All files are written in a
    temporary folder beside `folder`, which is renamed at the end.

    Args:
        plans: One plan, or the different plans of several ranks.
        folder: Folder of the package.
        toolchain: Compilers and libraries.
        overwrite: Whether a package that mbc wrote may be replaced.

    Returns:
        The package, with what is missing if its library could not be built.

    Raises:
        MbcError: MBC093 if `folder` exists and must not be replaced; MBC094 if the package cannot be written; MBC095 if
            a compiler rejects the sources; MBC099 if the package's name is one that other programs import.
    """
    check_output(folder, overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder) as temporary:
            first, *others = plans
            missing = _write(first, temporary / NEW, toolchain)
            for other in others:
                _write(other, temporary / NEW / rank_folder(other), toolchain)
            swap(temporary / NEW, folder, temporary / OLD)
    except OSError as error:
        raise _unwritable(folder, error) from error
    library = folder / LIBRARY
    return Package(folder, library if library.is_file() else None, missing)


def check_output(folder: Path, overwrite: bool) -> None:
    """Raise an error unless a package can be written to `folder` and imported from there.

    A user should hear of such a problem before planning rather than after it.

    Raises:
        MbcError: MBC093, MBC094 or MBC099, as in `write_package`.
    """
    _check_name(folder)
    try:
        clear(folder)
        free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        ours = (folder / MARKER).is_file()
        beside = next((parent for parent in folder.absolute().parents if parent.exists()), folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not free and not (ours and overwrite):
        raise MbcError(
            "MBC093",
            f"'{folder}' exists" + ("" if ours else " and was not made by mbc"),
            "pass --force to replace it" if ours else "choose another output folder with -o",
        )
    try:
        if not beside.is_dir() or (folder.exists() and (folder.samefile(os.curdir) or os.path.ismount(folder))):
            reason = errno.EBUSY if beside.is_dir() else errno.ENOTDIR  # the current folder cannot be renamed
            raise OSError(reason, os.strerror(reason))
        Path(tempfile.mkdtemp(prefix=".mbc-", dir=beside)).rmdir()
    except OSError as error:
        raise _unwritable(folder, error) from error


def _check_name(folder: Path) -> None:
    """Raise MBC099 if Python, started beside the package, would import it in place of a module that others need."""
    name = folder.absolute().name
    if name in sys.stdlib_module_names:
        whose = "a module of Python"
    elif name in _NEEDED or _installed(name):
        whose = "an installed package"
    else:
        return
    raise MbcError(
        "MBC099",
        f"a package called '{name}' would hide {whose}: programs beside it that import `{name}` would get the package",
        "choose another output folder with -o",
    )


def _installed(name: str) -> bool:
    """Return whether `import name` finds an installed module."""
    places = [place for key in ("purelib", "platlib") if (place := sysconfig.get_paths().get(key))]
    return PathFinder.find_spec(name, places) is not None if name.isidentifier() else False


def _unwritable(folder: Path, error: OSError) -> MbcError:
    return MbcError(
        "MBC094", f"cannot write '{folder}': {error.strerror or error}", "choose another output folder with -o"
    )


def _write(plan: Plan, folder: Path, toolchain: Toolchain) -> tuple[Missing, ...]:
    folder.mkdir()
    (folder / MARKER).write_text("made by mbc compile\n", encoding="utf-8")
    (folder / PLAN_FILE).write_text(dump_plan(plan), encoding="utf-8")
    (folder / "__init__.py").write_text(render_module(plan), encoding="utf-8")
    if not plan.is_timed:
        return ()  # no tool could build it for a GPU
    rows = view(plan)
    sources = folder / SOURCES
    write_sources(rows, plan.version, sources)
    missing = _lacking(rows.libraries, rows.architecture, toolchain)
    if missing:
        return missing
    build(rows, sources, folder / LIBRARY, toolchain)
    return ()


def write_sources(rows: View, version: str, sources: Path) -> None:
    """Write every source of the library into one flat folder, which can be compiled without mbc."""
    sources.mkdir(parents=True)
    for name, text in render(rows, version).items():
        (sources / name).write_text(text, encoding="utf-8")
    _copy_sources(host_files(rows), kernel_files(rows), sources)


def _copy_sources(hosts: Sequence[str], kernels: Sequence[str], sources: Path) -> None:
    """Copy the named files of templates/ and write every header; names are unique over all folders of kernels."""
    write_launch_headers(sources)
    templates = resource_folder("templates")
    copied = [templates / "host" / name for name in hosts]
    copied += [path for kind in ("host", "include") for path in sorted((templates / kind).glob("*.h"))]
    copied += sorted((templates / "kernels").rglob("*.cuh"))
    copied += [path for kind in ("kernels", "host") for path in sorted((templates / kind).rglob("*.cu"))
               if path.name in kernels]  # fmt: skip
    for path in copied:
        (sources / path.name).write_bytes(path.read_bytes())


def host_files(rows: View) -> list[str]:
    """Return the names of the host sources, apart from headers, that are equal for all plans."""
    return ["module.cpp", *_library_files(rows.libraries)]


def _library_files(libraries: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(file for name in libraries for file in _HOST_FILES[name]))


def _lacking(libraries: Sequence[str], architecture: str, toolchain: Toolchain) -> tuple[Missing, ...]:
    """Return the parts that the build needs and the toolchain does not have."""
    if architecture not in toolchain.architectures and is_plan_only(architecture):
        return (PLAN_ONLY,)
    needs: list[tuple[object, Missing]] = [(toolchain.nvcc, NVCC), (toolchain.gxx, GXX), (toolchain.cudart, CUDART)]
    if not CUDNN_LIBRARIES.isdisjoint(libraries):
        needs.append((toolchain.cudnn, CUDNN))
    if "cublaslt" in libraries:
        needs.append((toolchain.cublaslt, CUBLASLT))
    missing = [what for part, what in needs if part is None]
    if toolchain.architectures and architecture not in toolchain.architectures:
        supported = f"{toolchain.architectures[0]} to {toolchain.architectures[-1]}"
        missing.append(
            Missing(
                f"nvcc for {architecture}",
                f"this one compiles for {supported}",
                "install a CUDA toolkit that supports the GPU",
            )
        )
    return tuple(missing)


def build(rows: View, sources: Path, library: Path, toolchain: Toolchain) -> None:
    """Compile and link the sources that `write_sources` wrote.

    Raises:
        MbcError: MBC095 with the compiler's message.
    """
    kernels = (*kernel_files(rows), *(program.file for program in rows.generated))
    recipe = Recipe(rows.architecture, rows.working, kernels, tuple(host_files(rows)), ("program.cpp",))
    make_library(recipe, sources, library, toolchain, _parts(rows.libraries, toolchain))


def build_kernel_library(
    architecture: str,
    precision: Precision,
    library: Path,
    toolchain: Toolchain,
    kernels: Sequence[str] | None = None,
    programs: Sequence[MapProgram] = (),
) -> None:
    """Compile and link the library that mbc/measure/kernel_library.py loads.

    The library holds the host code of all providers, every kernel or only the sources of those `kernels`, and the
    generated kernels of `programs`. Its objects are the same as those of packages.

    Raises:
        MbcError: MBC096 if a tool is missing; MBC095 with the compiler's message; MBC090 for fp64.
    """
    working = working_code(precision)
    _check_tools(KERNEL_LIBRARIES, architecture, toolchain)
    files = tuple(every_kernel_file() if kernels is None else files_defining(symbols_of(kernels), KERNEL_LIBRARIES))
    hosts = (KERNEL_LIBRARY_SOURCE, *_library_files(KERNEL_LIBRARIES))
    with tempfile.TemporaryDirectory(prefix="mbc-sources-") as folder:
        sources = Path(folder)
        (sources / KERNEL_LIBRARY_SOURCE).write_text(render_kernel_library(), encoding="utf-8")
        _copy_sources(hosts[1:], files, sources)
        recipe = Recipe(architecture, working, (*files, *_write_generated(programs, sources)), hosts, ())
        make_library(recipe, sources, library, toolchain, _parts(KERNEL_LIBRARIES, toolchain))


def build_generated_library(
    architecture: str, precision: Precision, programs: Sequence[MapProgram], library: Path, toolchain: Toolchain
) -> None:
    """Compile and link a library of generated kernels; its objects are the same as those of packages.

    Raises:
        MbcError: MBC096 if a tool is missing; MBC095 with the compiler's message; MBC090 for fp64.
    """
    working = working_code(precision)
    _check_tools((), architecture, toolchain)
    with tempfile.TemporaryDirectory(prefix="mbc-sources-") as folder:
        sources = Path(folder)
        _copy_sources((), (), sources)
        text = (resource_folder("templates") / GENERATED_LIBRARY_SOURCE).read_bytes()
        (sources / GENERATED_LIBRARY_SOURCE).write_bytes(text)
        recipe = Recipe(architecture, working, _write_generated(programs, sources), (GENERATED_LIBRARY_SOURCE,), ())
        make_library(recipe, sources, library, toolchain, _parts((), toolchain))


def _write_generated(programs: Sequence[MapProgram], sources: Path) -> tuple[str, ...]:
    """Write the sources of generated kernels; return their names."""
    for program in programs:
        (sources / program.file).write_text(render_generated(program), encoding="utf-8")
    return tuple(program.file for program in programs)


def _check_tools(libraries: Sequence[str], architecture: str, toolchain: Toolchain) -> None:
    missing = _lacking(libraries, architecture, toolchain)
    if missing:
        names = "; ".join(f"{part.name} ({part.purpose})" for part in missing)
        raise MbcError("MBC096", f"the kernels cannot be built: no {names}", "; ".join(p.remedy for p in missing))


def _parts(libraries: Sequence[str], toolchain: Toolchain) -> list[Part]:
    wanted = [toolchain.cudart]
    if not CUDNN_LIBRARIES.isdisjoint(libraries):
        wanted.append(toolchain.cudnn)
    if "cublaslt" in libraries:
        wanted.append(toolchain.cublaslt)
    return [part for part in wanted if part is not None]
