"""Sources to objects to a shared library: compilers side by side, and nothing compiled that the cache has.

Each kernel file is an object of its own. For ResNet's seven files on two cores that takes 13.6 s where one file that
includes them all takes 10.7; but sixteen cores compile every file there is in 3 to 5 s, and the next network compiles
only what it alone needs.
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
from dataclasses import dataclass
from pathlib import Path

from mbc.codegen.cache import ObjectCache, find_cache
from mbc.codegen.toolchain import Part, Toolchain
from mbc.errors import MbcError
from mbc.hardware.spec import has_warpgroups

_COMPILER_LINES = 20  # of a compiler's complaint, shown to the user
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.M)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one library is made of: files of one folder of sources, which needs nothing else of mbc. Without `kernels`
    it needs no nvcc, and `architecture` and `working` say nothing."""

    architecture: str  # sm_90
    working: int  # MBC_WORKING: code of the working type
    kernels: tuple[str, ...]  # for nvcc, each an object of its own, so that libraries share them
    hosts: tuple[str, ...]  # for g++
    changing: tuple[str, ...]  # for g++ as well, but different in every plan: not worth keeping


@dataclass(frozen=True, slots=True)
class _Compilation:
    """`command` runs in the folder of sources and lacks only the object's name. `includes`: folders, beside the
    compiler's own, where headers are looked for."""

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
    """Compile and link against `parts`. Raises MBC095 with what the compiler says."""
    sources = sources.absolute()
    cache = find_cache() if cache is None else cache
    compilations = _compilations(recipe, toolchain, parts)
    versions = _versions(toolchain)
    read = functools.cache(_read)
    with tempfile.TemporaryDirectory(prefix="mbc-build-") as scratch:
        objects = [Path(scratch) / f"{compilation.source}.o" for compilation in compilations]

        def make(compilation: _Compilation, target: Path) -> None:
            key = _key(compilation, sources, versions, read) if compilation.kept else ""
            if key and cache.fetch(key, target):
                return
            _run((*compilation.command, "-o", str(target)), sources)
            if key:
                cache.keep(key, target)

        with ThreadPoolExecutor(max_workers=_processors()) as pool:
            made = [pool.submit(make, *pair) for pair in zip(compilations, objects, strict=True)]
        for future in made:  # the first failure is told, after all have ended
            future.result()
        compiler = str(toolchain.gxx)
        _run((compiler, "-shared", "-o", str(library), *map(str, objects), *_links(parts)), Path.cwd())


def _compilations(recipe: Recipe, toolchain: Toolchain, parts: Sequence[Part]) -> list[_Compilation]:
    """The longest first, so that none starts when the others are done: nvcc, then g++."""
    assert toolchain.gxx is not None
    compiler = str(toolchain.gxx.absolute())  # commands run in the folder of sources
    nvcc = _nvcc(recipe, toolchain, compiler) if recipe.kernels else ()
    folders = tuple(dict.fromkeys(part.include.absolute() for part in parts))
    gxx = (
        compiler, "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-I.",
        *(f"-I{folder}" for folder in folders), "-c",
    )  # fmt: skip
    return [
        *(_Compilation(name, (*nvcc, name), (), True) for name in recipe.kernels),
        *(_Compilation(name, (*gxx, name), folders, False) for name in recipe.changing),
        *(_Compilation(name, (*gxx, name), folders, True) for name in recipe.hosts),
    ]


def _nvcc(recipe: Recipe, toolchain: Toolchain, compiler: str) -> tuple[str, ...]:
    # wgmma is among the instructions of one architecture only, whose code has a name of its own.
    code = "90a" if has_warpgroups(recipe.architecture) else recipe.architecture.removeprefix("sm_")
    assert toolchain.nvcc is not None
    return (
        str(toolchain.nvcc.absolute()), "-std=c++17", "-O3", f"-gencode=arch=compute_{code},code=sm_{code}",
        f"-DMBC_WORKING={recipe.working}", "-I.", "-Xcompiler", "-fPIC", "-ccbin", compiler, "-c",
    )  # fmt: skip


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions(toolchain: Toolchain) -> str:
    """What the compilers say of themselves: a path alone stays the same through an update. nvcc calls g++."""
    told: list[str] = []
    for compiler in filter(None, (toolchain.nvcc, toolchain.gxx)):
        done = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, check=False)
        told.append(done.stdout)
    return "\n".join(told)


Reader = Callable[[Path], tuple[bytes, tuple[str, ...]] | None]


def _read(path: Path) -> tuple[bytes, tuple[str, ...]] | None:
    """Digest of a file and what it includes; None where there is no such file."""
    try:
        text = path.read_bytes()
    except OSError:
        return None
    return hashlib.sha256(text).digest(), tuple(os.fsdecode(name) for name in _INCLUDE.findall(text))


def _key(compilation: _Compilation, sources: Path, versions: str, read: Reader) -> str:
    """Name of the object: the command, the compilers, and every file of the source's and the parts' folders that is
    read, or might be under another macro. The compilers' own headers are as their versions."""
    digest = hashlib.sha256(repr((compilation.command, versions)).encode())
    pending = [sources / compilation.source]
    seen = set(pending)
    while pending:
        path = pending.pop()
        found = read(path)
        if found is None:
            continue
        content, includes = found
        digest.update(path.name.encode() + b"\0" + content)
        # The including file's folder comes first, as for the compiler.
        folders = (path.parent, sources, *compilation.includes)
        for name in includes:
            place = next((folder / name for folder in folders if read(folder / name) is not None), None)
            if place is not None and place not in seen:
                seen.add(place)
                pending.append(place)
    return digest.hexdigest()


def _links(parts: Iterable[Part]) -> list[str]:
    """NVIDIA's packages have no development links (libcudnn.so), so that the exact file names are given."""
    flags: list[str] = []
    for part in parts:
        flags.append(f"-L{part.library_folder}")
        if not part.library.endswith(".a"):
            flags.append(f"-Wl,-rpath,{part.library_folder}")
        flags.append(f"-l:{part.library}")
    return [*flags, "-ldl", "-lrt", "-lpthread"]


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a compiler in `folder`. Raises MBC095 with the first lines that it says where it fails."""
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        return
    lines = done.stdout.strip().splitlines()
    told = "\n".join(lines[:_COMPILER_LINES]) + ("\n..." if len(lines) > _COMPILER_LINES else "")
    raise MbcError(
        "MBC095",
        f"{Path(command[0]).name} could not build the generated code:\n{told}",
        "check that the CUDA toolkit, g++ and cuDNN fit together with: mbc doctor",
    )
