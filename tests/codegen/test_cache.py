"""Compiled objects are kept, and no fault of the cache stops a build."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.codegen.cache import ObjectCache, find_cache
from mbc.codegen.objects import Recipe, make_library
from mbc.codegen.toolchain import Part, Toolchain
from mbc.progress import announcements_to

RECIPE = Recipe("sm_90", 1, ("a.cu", "b.cu"), ("host.cpp",), ("program.cpp",))

# Stands in for nvcc, g++ and the linker: says what it compiles, and copies it to the object.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "compiler of {version}"; exit; fi
source=; output=
while [ $# -gt 0 ]; do
  case "$1" in -o) shift; output=$1;; *.cu|*.cpp) source=$1;; esac
  shift
done
if [ -n "$source" ]; then echo "$source" >> "{log}"; cat "$source" > "$output"; else echo linked > "$output"; fi
"""


class Bench:
    """Sources, a compiler that logs its calls, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "source"
        self.sources.mkdir(parents=True)
        self.write("a.cu", '#include "shared.cuh"\nA')
        self.write("b.cu", "B")
        self.write("shared.cuh", "#  include <inner.h>\n#include <cuda_runtime.h>")
        self.write("inner.h", "inner")
        self.write("host.cpp", '#include "plan_tables.h"\n#include <cudnn.h>')
        self.write("plan_tables.h", "program")
        self.write("program.cpp", "the plan")
        self.include = folder / "include"
        self.include.mkdir()
        (self.include / "cudnn.h").write_text("version 9.19")
        self.log = folder / "log"
        self.compiler = folder / "cc"
        self.write_compiler("today")
        self.cache = ObjectCache(folder / "cache")

    def write(self, name: str, text: str) -> None:
        (self.sources / name).write_text(text)

    def write_compiler(self, version: str) -> None:
        self.compiler.write_text(COMPILER.format(version=version, log=self.log))
        self.compiler.chmod(0o755)

    def build(self, recipe: Recipe = RECIPE) -> set[str]:
        """Build the library of a recipe and return the sources that were compiled."""
        self.log.write_text("")
        part = Part(self.include, self.folder, "libx.so.1")
        toolchain = Toolchain(self.compiler, self.compiler, part, part, part, (), ())
        library = self.folder / "library.so"
        library.unlink(missing_ok=True)
        make_library(recipe, self.sources, library, toolchain, [part], self.cache)
        assert library.read_text() == "linked\n"
        return set(self.log.read_text().split())

    def entries(self) -> list[Path]:
        assert self.cache.folder is not None
        return sorted(self.cache.folder.iterdir())


EVERYTHING = {"a.cu", "b.cu", "host.cpp", "program.cpp"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_only_the_plan_is_compiled_again(bench: Bench) -> None:
    assert bench.build() == EVERYTHING
    assert bench.build() == {"program.cpp"}
    assert len(bench.entries()) == 3


def test_kernels_that_nvcc_compiles_are_announced(bench: Bench) -> None:
    lines: list[str] = []
    with announcements_to(lines.append):
        bench.build()
        bench.build()
        bench.write("b.cu", "changed")
        bench.build()
        bench.cache = ObjectCache(None)
        bench.build()
    stored = " with nvcc: later builds take them from the cache"
    assert lines == [
        f"compiling 2 sources of kernels{stored}",
        f"compiling 1 source of kernels{stored}",
        "compiling 2 sources of kernels with nvcc",
    ]


def test_equal_sources_in_another_folder_are_cached(bench: Bench) -> None:
    bench.build()
    bench.sources = bench.sources.rename(bench.folder / "elsewhere")
    assert bench.build() == {"program.cpp"}


@pytest.mark.parametrize(
    ("changed", "compiled"),
    [
        ("b.cu", {"b.cu"}),
        ("shared.cuh", {"a.cu"}),
        ("inner.h", {"a.cu"}),  # included by an included file
        ("plan_tables.h", {"host.cpp"}),
        ("program.cpp", set[str]()),
    ],
)
def test_sources_that_include_a_changed_file_are_compiled_again(bench: Bench, changed: str, compiled: set[str]) -> None:
    bench.build()
    bench.write(changed, (bench.sources / changed).read_text() + " // changed")
    assert bench.build() == compiled | {"program.cpp"}


def test_another_cudnn_architecture_type_or_compiler_is_another_object(bench: Bench) -> None:
    bench.build()
    (bench.include / "cudnn.h").write_text("version 9.20")
    assert bench.build() == {"host.cpp", "program.cpp"}
    assert bench.build(replace(RECIPE, architecture="sm_100")) == {"a.cu", "b.cu", "program.cpp"}
    assert bench.build(replace(RECIPE, working=2)) == {"a.cu", "b.cu", "program.cpp"}
    bench.write_compiler("tomorrow")
    assert bench.build() == EVERYTHING


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_damaged_entries_are_compiled_again(bench: Bench, damage: bytes | None) -> None:
    bench.build()
    for entry in bench.entries():
        whole = entry.read_bytes()
        entry.write_bytes(whole[:-1] if damage is None else damage)
    assert bench.build() == EVERYTHING
    assert bench.build() == {"program.cpp"}


def test_switched_off(bench: Bench) -> None:
    bench.cache = find_cache({"MBC_CACHE": "", "HOME": str(bench.folder)})
    assert bench.cache.folder is None
    assert bench.build() == bench.build() == EVERYTHING
    assert not (bench.folder / ".cache").exists()


def test_where_it_is(tmp_path: Path) -> None:
    home, named = str(tmp_path / "home"), str(tmp_path / "named")
    assert find_cache({"MBC_CACHE": named, "HOME": home}).folder == tmp_path / "named" / "objects"
    assert find_cache({"XDG_CACHE_HOME": named, "HOME": home}).folder == tmp_path / "named" / "mbc" / "objects"
    for relative in ({}, {"XDG_CACHE_HOME": "here"}, {"XDG_CACHE_HOME": ""}):
        folder = find_cache({"HOME": home, **relative}).folder
        assert folder == tmp_path / "home" / ".cache" / "mbc" / "objects"
    assert find_cache({}).folder is None


def test_a_folder_that_cannot_be_written_just_compiles(bench: Bench) -> None:
    (bench.folder / "file").write_text("")
    bench.cache = ObjectCache(bench.folder / "file" / "objects")
    assert bench.build() == bench.build() == EVERYTHING


def test_a_full_disk_just_compiles(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert bench.build() == EVERYTHING
    assert bench.entries() == []  # nothing half done is left
    assert bench.build() == EVERYTHING


def test_concurrent_writers_and_readers(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "cache")
    sources = [tmp_path / f"source{i}" for i in range(2)]
    for i, source in enumerate(sources):
        source.write_bytes(bytes([i]) * 200_000)

    def work(number: int) -> bool:
        cache.keep("key", sources[number % 2])
        target = tmp_path / f"target{number}"
        return cache.fetch("key", target) and len(set(target.read_bytes())) == 1

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))  # whole, and of one writer
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key"]


def test_concurrent_builds_compile_an_object_once(tmp_path: Path) -> None:
    """Each of four builds has a folder of its own, as ranks have, and all need the same objects."""
    benches = [Bench(tmp_path / str(number)) for number in range(4)]
    compiler = benches[0].compiler
    compiler.write_text(COMPILER.format(version="today", log=tmp_path / "log").replace("cat ", "sleep 0.2; cat "))
    for bench in benches:
        bench.compiler, bench.cache, bench.include = compiler, benches[0].cache, benches[0].include
    with ThreadPoolExecutor(len(benches)) as pool:
        list(pool.map(Bench.build, benches))
    compiled = (tmp_path / "log").read_text().split()
    assert sorted(compiled) == ["a.cu", "b.cu", "host.cpp", *["program.cpp"] * 4]
    assert len(benches[0].entries()) == 3, "no lock is left"


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 1000)
    cache = ObjectCache(tmp_path / "cache", limit_bytes=3 * 1032)
    for number in range(3):
        cache.keep(f"key{number}", source)
        os.utime(tmp_path / "cache" / f"key{number}", (number, number))
    left = tmp_path / "cache" / ".left-by-a-kill"
    left.write_bytes(b"x")
    os.utime(left, (0.5, 0.5))
    assert cache.fetch("key0", tmp_path / "target")  # used: now the newest
    cache.keep("key3", source)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["key0", "key2", "key3"]
