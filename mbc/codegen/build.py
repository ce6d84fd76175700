"""Writes a package: the plan, its sources, the Python module, and the library built of them. Whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mbc.codegen.render import kernel_files, render, render_module
from mbc.codegen.toolchain import CUBLASLT, CUDART, CUDNN, GXX, NVCC, Missing, Part, Toolchain
from mbc.codegen.view import View, view
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.plan.file import PLAN_FILE, dump_plan
from mbc.plan.model import Plan
from mbc.resources import folder as resource_folder

LIBRARY = "libmodule.so"
SOURCES = "source"
MARKER = ".mbc-package"  # a folder with this file is mbc's to replace

_HOST_FILES = {"cudnn": "convolution.cpp", "cublaslt": "matmul.cpp"}
_COMPILER_LINES = 20  # of a compiler's complaint, shown to the user


@dataclass(frozen=True, slots=True)
class Package:
    """What was written. `library` is None where it could not be built, and `missing` says why: the module then runs on
    the CPU."""

    folder: Path
    library: Path | None
    missing: tuple[Missing, ...]


def write_package(plan: Plan, folder: Path, toolchain: Toolchain, overwrite: bool = False) -> Package:
    """Write `plan` as the importable package `folder` and build its library where the toolchain allows.

    All is done in a new folder beside it, renamed at the end. Raises MBC093 where `folder` exists and must not be
    replaced, MBC094 where it cannot be written, MBC095 where a compiler rejects the sources.
    """
    check_output(folder, overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        missing = _write(plan, temporary, toolchain)
        temporary.chmod(0o755)  # mkdtemp keeps others out
        _swap(temporary, folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    library = folder / LIBRARY
    return Package(folder, library if library.is_file() else None, missing)


def check_output(folder: Path, overwrite: bool) -> None:
    """MBC093 or MBC094 where a package could not be written: better known before planning than after it."""
    try:
        free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        ours = (folder / MARKER).is_file()
        beside = next(parent for parent in folder.absolute().parents if parent.exists())
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not free and not (ours and overwrite):
        raise MbcError(
            "MBC093",
            f"'{folder}' exists" + ("" if ours else " and was not made by mbc"),
            "pass --force to replace it" if ours else "choose another output folder with -o",
        )
    reason = errno.ENOTDIR if not beside.is_dir() else 0 if os.access(beside, os.W_OK | os.X_OK) else errno.EACCES
    if reason:
        raise _unwritable(folder, OSError(reason, os.strerror(reason)))


def _unwritable(folder: Path, error: OSError) -> MbcError:
    return MbcError(
        "MBC094", f"cannot write '{folder}': {error.strerror or error}", "choose another output folder with -o"
    )


def _swap(temporary: Path, folder: Path) -> None:
    """Put the new folder in the place of the old one, which stays until the new one stands."""
    if not folder.exists():
        temporary.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        folder.rename(old / "package")
        try:
            temporary.rename(folder)
        except OSError:
            (old / "package").rename(folder)
            raise
    except OSError:
        old.rmdir()  # empty again: never what was there before
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write(plan: Plan, folder: Path, toolchain: Toolchain) -> tuple[Missing, ...]:
    (folder / MARKER).write_text("made by mbc compile\n", encoding="utf-8")
    (folder / PLAN_FILE).write_text(dump_plan(plan), encoding="utf-8")
    (folder / "__init__.py").write_text(render_module(plan), encoding="utf-8")
    if plan.graph.precision is Precision.FP64:
        return (Missing("a GPU library", "runs the module on a GPU", "choose another precision: fp64 is for the CPU"),)
    rows = view(plan)
    sources = folder / SOURCES
    write_sources(rows, plan.version, sources)
    missing = _lacking(rows, toolchain)
    if missing:
        return missing
    build(rows, sources, folder / LIBRARY, toolchain)
    return ()


def write_sources(rows: View, version: str, sources: Path) -> None:
    """Everything that the library is built of, in one flat folder that needs nothing else of mbc."""
    sources.mkdir(parents=True)
    for name, text in render(rows, version).items():
        (sources / name).write_text(text, encoding="utf-8")
    templates = resource_folder("templates")
    copied = [templates / "host" / name for name in ("program.h", *host_files(rows))]
    copied += sorted((templates / "include").glob("*.h")) + sorted((templates / "kernels").glob("*.cuh"))
    needed = set(kernel_files(rows))
    copied += [path for kind in ("kernels", "host") for path in sorted((templates / kind).glob("*.cu"))
               if path.name in needed]  # fmt: skip
    for path in copied:
        (sources / path.name).write_bytes(path.read_bytes())


def host_files(rows: View) -> list[str]:
    """The host sources that do not change with the plan, beside program.h."""
    return ["module.cpp", *(_HOST_FILES[name] for name in rows.libraries)]


def _lacking(rows: View, toolchain: Toolchain) -> tuple[Missing, ...]:
    """What this plan's build needs and the toolchain has not."""
    needs: list[tuple[object, Missing]] = [
        (toolchain.nvcc, NVCC),
        (toolchain.gxx, GXX),
        (toolchain.cudart, CUDART),
    ]
    if "cudnn" in rows.libraries:
        needs.append((toolchain.cudnn, CUDNN))
    if "cublaslt" in rows.libraries:
        needs.append((toolchain.cublaslt, CUBLASLT))
    missing = [what for part, what in needs if part is None]
    if toolchain.architectures and rows.architecture not in toolchain.architectures:
        known = f"{toolchain.architectures[0]} to {toolchain.architectures[-1]}"
        missing.append(
            Missing(
                f"nvcc for {rows.architecture}",
                f"this one compiles for {known}",
                "install a CUDA toolkit that supports the GPU",
            )
        )
    return tuple(missing)


def build(rows: View, sources: Path, library: Path, toolchain: Toolchain) -> None:
    """Compile and link. Raises MBC095 with what the compiler says."""
    assert toolchain.nvcc is not None and toolchain.gxx is not None and toolchain.cudart is not None
    parts = _parts(rows, toolchain)
    includes = [f"-I{folder}" for folder in dict.fromkeys((sources, *(part.include for part in parts)))]
    code = rows.architecture.removeprefix("sm_")
    host = ["program.cpp", *host_files(rows)]
    with tempfile.TemporaryDirectory(prefix="mbc-build-") as scratch:
        objects = {name: Path(scratch) / f"{name}.o" for name in (*host, "kernels.cu")}
        commands: list[Sequence[str]] = []
        # The longest first: nvcc and g++ work side by side.
        commands.append(
            [str(toolchain.nvcc), "-std=c++17", "-O3", f"-gencode=arch=compute_{code},code=sm_{code}",
             f"-I{sources}", "-Xcompiler", "-fPIC", "-ccbin", str(toolchain.gxx),
             "-c", str(sources / "kernels.cu"), "-o", str(objects["kernels.cu"])]
        )  # fmt: skip
        commands += [
            [str(toolchain.gxx), "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", *includes,
             "-c", str(sources / name), "-o", str(objects[name])]
            for name in host
        ]  # fmt: skip
        _run_all(commands)
        _run_all([[str(toolchain.gxx), "-shared", "-o", str(library), *map(str, objects.values()), *_links(parts)]])


def _parts(rows: View, toolchain: Toolchain) -> list[Part]:
    wanted = [toolchain.cudart]
    if "cudnn" in rows.libraries:
        wanted.append(toolchain.cudnn)
    if "cublaslt" in rows.libraries:
        wanted.append(toolchain.cublaslt)
    return [part for part in wanted if part is not None]


def _links(parts: Iterable[Part]) -> list[str]:
    """NVIDIA's packages have no development links (libcudnn.so), so that the exact file names are given."""
    flags: list[str] = []
    for part in parts:
        flags.append(f"-L{part.library_folder}")
        if not part.library.endswith(".a"):
            flags.append(f"-Wl,-rpath,{part.library_folder}")
        flags.append(f"-l:{part.library}")
    return [*flags, "-ldl", "-lrt", "-lpthread"]


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run compilers side by side; the first that fails is reported, after all have ended."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    failures: list[tuple[Sequence[str], str]] = []
    for command, process in zip(commands, running, strict=True):
        output, _ = process.communicate()
        if process.returncode != 0:
            failures.append((command, output))
    if failures:
        command, output = failures[0]
        lines = output.strip().splitlines()
        told = "\n".join(lines[:_COMPILER_LINES]) + ("\n..." if len(lines) > _COMPILER_LINES else "")
        raise MbcError(
            "MBC095",
            f"{Path(command[0]).name} could not build the generated code:\n{told}",
            "check that the CUDA toolkit, g++ and cuDNN fit together with: mbc doctor",
        )
