"""Compiles sources to objects and links a shared library: compilers run in parallel, and cached objects are reused.

Each kernel file is an object of its own. On two cores, ResNet's seven files take 13.6 s, and one file that includes
them all takes 10.7 s. But several cores compile several files at the same time, and the next network compiles only
those files that no earlier network needed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from mbc.codegen.cache import ObjectCache, find_cache
from mbc.codegen.toolchain import Part, Toolchain
from mbc.errors import MbcError
from mbc.hardware.instructions import Instruction, has_instruction
from mbc.kernels.cuda import WGMMA_SOURCES
from mbc.progress import announce

_COMPILER_LINES = 20  # lines of a compiler's message that the user sees
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.M)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sources of one library: files of one folder, which can be compiled without mbc.

    A library without `kernels` needs no nvcc; `architecture` and `working` are then not used.
    """

    architecture: str  # sm_90
    working: int  # MBC_WORKING: code of the working type
    kernels: tuple[str, ...]  # for nvcc, each an object of its own, so that libraries share them
    hosts: tuple[str, ...]  # for g++
    changing: tuple[str, ...]  # for g++ as well, but different in every plan: not cached


@dataclass(frozen=True, slots=True)
class _Compilation:
    """One run of a compiler in the folder of sources.

    `command` lacks only the object's name. `includes` are folders, beside the compiler's own, in which headers are
    searched.
    """

    source: str
    command: tuple[str, ...]
    includes: tuple[Path, ...]
    kept: bool


def make_library(
    recipe: Recipe,
    sources: Path,
    library: Path,
    toolchain: Toolchain,
    parts: Sequence[Part],
    cache: ObjectCache | None = None,
) -> None:
    """Compile the sources of a recipe and link them against `parts`.

    Raises:
        MbcError: MBC095 with the compiler's message.
    """
    sources = sources.absolute()
    cache = find_cache() if cache is None else cache
    compilations = _compilations(recipe, toolchain, parts)
    versions = _versions(toolchain)
    read = functools.cache(_read)
    with tempfile.TemporaryDirectory(prefix="mbc-build-") as scratch:
        objects = [Path(scratch) / f"{compilation.source}.o" for compilation in compilations]
        keys = [_key(one, sources, versions, read) if one.kept else "" for one in compilations]
        missing = sum(not cache.has(key) for key in keys[: len(recipe.kernels)])
        _announce_compilation(missing, cache)

        def make(compilation: _Compilation, key: str, target: Path) -> None:
            if key and cache.fetch(key, target):
                return
            with cache.making(key) if key else nullcontext():
                if key and cache.fetch(key, target):
                    return
                _run((*compilation.command, "-o", str(target)), sources)
                if key:
                    cache.keep(key, target)

        with ThreadPoolExecutor(max_workers=_processors()) as pool:
            futures = [pool.submit(make, *pair) for pair in zip(compilations, keys, objects, strict=True)]
        for future in futures:  # raises the first failure, after all have ended
            future.result()
        compiler = str(toolchain.gxx)
        _run((compiler, "-shared", "-o", str(library), *map(str, objects), *_links(parts)), Path.cwd())


def _announce_compilation(count: int, cache: ObjectCache) -> None:
    """Announce the kernel sources that nvcc compiles now, which takes seconds for each."""
    if count:
        kept = "" if cache.folder is None else ": later builds take them from the cache"
        announce(f"compiling {count} source{'' if count == 1 else 's'} of kernels with nvcc{kept}")


def _compilations(recipe: Recipe, toolchain: Toolchain, parts: Sequence[Part]) -> list[_Compilation]:
    """Return the compilations, the longest first, so that none starts when the others are done: nvcc, then g++."""
    assert toolchain.gxx is not None
    compiler = str(toolchain.gxx.absolute())  # commands run in the folder of sources
    nvcc = _nvcc(recipe, toolchain, compiler) if recipe.kernels else ()
    codes = {name: code_option(recipe.architecture, name) for name in recipe.kernels}
    folders = tuple(dict.fromkeys(part.include.absolute() for part in parts))
    gxx = (
        compiler, "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-I.",
        *(f"-I{folder}" for folder in folders), "-c",
    )  # fmt: skip
    return [
        *(_Compilation(name, (*nvcc, code, name), (), True) for name, code in codes.items()),
        *(_Compilation(name, (*gxx, name), folders, False) for name in recipe.changing),
        *(_Compilation(name, (*gxx, name), folders, True) for name in recipe.hosts),
    ]


def _nvcc(recipe: Recipe, toolchain: Toolchain, compiler: str) -> tuple[str, ...]:
    assert toolchain.nvcc is not None
    return (
        str(toolchain.nvcc.absolute()), "-std=c++17", "-O3",
        f"-DMBC_WORKING={recipe.working}", "-I.", "-Xcompiler", "-fPIC", "-ccbin", compiler, "-c",
    )  # fmt: skip


def code_option(architecture: str, source: str) -> str:
    """Return nvcc's option for the code of a source: that of the GPU, and PTX, which the driver of newer GPUs compiles.

    Only one architecture has wgmma. Code with it is compiled for a target of its own, sm_90a, whose PTX no other runs.
    """
    if has_instruction(architecture, Instruction.WGMMA) and Path(source).name in WGMMA_SOURCES:
        return "-gencode=arch=compute_90a,code=sm_90a"
    code = architecture.removeprefix("sm_")
    return f"-gencode=arch=compute_{code},code=[sm_{code},compute_{code}]"


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions(toolchain: Toolchain) -> str:
    """Return the version texts of nvcc and of g++, which nvcc calls; an update may leave the compilers' paths equal."""
    versions: list[str] = []
    for compiler in filter(None, (toolchain.nvcc, toolchain.gxx)):
        done = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, check=False)
        versions.append(done.stdout)
    return "\n".join(versions)


Reader = Callable[[Path], tuple[bytes, tuple[str, ...]] | None]


def _read(path: Path) -> tuple[bytes, tuple[str, ...]] | None:
    """Return the digest of a file and the names that it includes, or None if there is no such file."""
    try:
        text = path.read_bytes()
    except OSError:
        return None
    return hashlib.sha256(text).digest(), tuple(os.fsdecode(name) for name in _INCLUDE.findall(text))


def _key(compilation: _Compilation, sources: Path, versions: str, read: Reader) -> str:
    """Return the name of the object in the cache.

    It is a digest of the command, the compilers' versions, and every file of the sources' and the parts' folders that
    is included, or could be included under another macro. The versions represent the compilers' own headers.
    """
    digest = hashlib.sha256(repr((compilation.command, versions)).encode())
    pending = [sources / compilation.source]
    seen = set(pending)
    while pending:
        path = pending.pop()
        file = read(path)
        if file is None:
            continue
        content, includes = file
        digest.update(path.name.encode() + b"\0" + content)
        # The compiler, too, searches the including file's folder first.
        folders = (path.parent, sources, *compilation.includes)
        for name in includes:
            place = next((folder / name for folder in folders if read(folder / name) is not None), None)
            if place is not None and place not in seen:
                seen.add(place)
                pending.append(place)
    return digest.hexdigest()


def _links(parts: Iterable[Part]) -> list[str]:
    """Return the linker's arguments.

    They name exact files, because NVIDIA's packages have no development links (libcudnn.so).
    """
    flags: list[str] = []
    for part in parts:
        flags.append(f"-L{part.library_folder}")
        if not part.library.endswith(".a"):
            flags.append(f"-Wl,-rpath,{part.library_folder}")
        flags.append(f"-l:{part.library}")
    return [*flags, "-ldl", "-lrt", "-lpthread"]


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a compiler in `folder`; raise MBC095 with the first lines of its output if it fails."""
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        return
    lines = done.stdout.strip().splitlines()
    message = "\n".join(lines[:_COMPILER_LINES]) + ("\n..." if len(lines) > _COMPILER_LINES else "")
    raise MbcError(
        "MBC095",
        f"{Path(command[0]).name} could not build the generated code:\n{message}",
        "check that the CUDA toolkit, g++ and cuDNN fit together with: mbc doctor",
    )
