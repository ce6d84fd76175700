"""Renders the source files of a package from a view of its plan; equal plans give equal bytes."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jinja2

from mbc.codegen.view import CUDNN_LIBRARIES, KERNEL_LIBRARIES, Launcher, Row, View
from mbc.errors import MbcError
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.plan.model import Plan
from mbc.resources import folder

_DEFINITION = re.compile(
    r"const\s+char\s*\*\s*mbc_(\w+)\s*\(\s*const\s+MbcCall\s*&\s*\w*\s*\)\s*\{|^MBC_LAUNCHER\((\w+),", re.MULTILINE
)
_TYPE_CODES = {"kernel": "MBC_KERNEL", "copy": "MBC_COPY"}


def render(view: View, version: str) -> dict[str, str]:
    """Return the text of each generated file by its name; `version` is the version of mbc."""
    environment = _environment()
    for text in (view.network, view.target, view.architecture, version):
        _checked(text)
    fields: dict[str, Any] = {
        "view": view,
        "version": version,
        "launchers": [_launcher_fields(launcher, view) for launcher in view.launchers],
        "programs": [_program_fields(name, rows) for name, rows in view.programs.items()],
        "cudnn_version": "cudnn_version" if view.uses_cudnn else "nullptr",
    }
    files = {program.file: render_generated(program) for program in view.generated}
    return {"program.cpp": environment.get_template("program.cpp.j2").render(fields), **files}


def render_generated(program: MapProgram) -> str:
    """Return the source of a generated kernel; equal programs give equal bytes."""
    return _environment().get_template("kernels/generated/map.cu.j2").render({"program": program})


def render_kernel_library() -> str:
    """Return the source of the interface that mbc/measure/kernel_library.py loads; it is equal for all GPUs."""
    return _environment().get_template("kernel_library.cpp.j2").render({"libraries": KERNEL_LIBRARIES})


def render_module(plan: Plan) -> str:
    """Return the text of the package's `__init__.py`."""
    header = {"network": plan.graph.name, "target": plan.target.gpu, "version": plan.version}
    return _environment().get_template("__init__.py.j2").render({key: _checked(text) for key, text in header.items()})


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # `_checked` refuses text that could end a comment or a string
    )


def _launcher_fields(launcher: Launcher, view: View) -> dict[str, str]:
    own = launcher.library in _TYPE_CODES
    return {
        "name": launcher.name,
        "library": _TYPE_CODES[launcher.library] if own else str(view.libraries.index(launcher.library)),
        "function": launcher.symbol if launcher.library == "kernel" else "nullptr",
    }


def _program_fields(name: str, rows: tuple[Row, ...]) -> dict[str, Any]:
    names = [_checked(row.comment) for row in rows]
    return {
        "name": name,
        "count": len(rows),
        "rows": [f"/* {i} {names[i]} */ {_numbers(row)}" for i, row in enumerate(rows)],
        "reals": [f"/* {i} */ {', '.join(map(_real, row.reals))}," for i, row in enumerate(rows) if row.reals],
        "names": names,
    }


def _numbers(row: Row) -> str:
    counts = (len(row.offsets), len(row.integers), len(row.reals), len(row.waits))
    numbers = (row.launcher, row.stream, *counts, *row.offsets, *row.integers, *row.waits)
    return ",".join(map(str, numbers)) + ","


def _real(value: float) -> str:
    """Return an exact C++ literal for any value of a double."""
    if value != value:
        return '__builtin_nan("")'
    if value in (float("inf"), float("-inf")):
        return "__builtin_inf()" if value > 0 else "-__builtin_inf()"
    return float(value).hex()


_SAFE = re.compile(r"[A-Za-z0-9_.,+=()/@ -]*")


def _checked(text: str) -> str:
    """Return `text`. Raise MBC091 if it contains characters that end a comment or a string of C++ or Python."""
    if not _SAFE.fullmatch(text):
        raise MbcError(
            "MBC091",
            f"the plan has a name that cannot stand in generated code: {text!r}",
            "compile the source again: plans made by mbc hold letters, digits, '_' and '.' only",
        )
    return text


def kernel_files(view: View) -> list[str]:
    """Return the names of mbc's kernel sources that define the functions which `view` calls.

    Raises:
        MbcError: MBC092 if a function is not defined.
    """
    generated = {program.symbol for program in view.generated}
    return files_defining([symbol for symbol in view.symbols if symbol not in generated], view.libraries)


def files_defining(symbols: Collection[str], libraries: Collection[str]) -> list[str]:
    """Return the names of the kernel sources that a package needs.

    They define the given launchers, and the launchers that the host code for the given libraries calls.

    Raises:
        MbcError: MBC092 if a launcher is not defined.
    """
    defined = _definitions(folder("templates"))
    needed = set(symbols)
    if not CUDNN_LIBRARIES.isdisjoint(libraries):
        needed.add("mbc_widen")  # widens filter gradients of bf16 and fp16 operands
    if "nccl" in libraries:
        needed.add("mbc_sum_parts")  # sums the parts of all ranks if copies move them
    if "cudnn" in libraries:
        needed.add("mbc_moments")  # computes statistics from the sums of a convolution's epilogue
    missing = sorted(needed - defined.keys())
    if missing:
        raise MbcError(
            "MBC092",
            f"this mbc has no kernel called {', '.join(name.removeprefix('mbc_') for name in missing)}",
            "the plan was written by another version of mbc: compile the source again",
        )
    return sorted({defined[symbol] for symbol in needed})


def every_kernel_file() -> list[str]:
    """Return the names of all kernel sources."""
    return sorted(set(_definitions(folder("templates")).values()))


def _definitions(templates: Path) -> dict[str, str]:
    """Return the name of the file that defines each launcher, by the launcher's symbol."""
    files = (*sorted((templates / "kernels").rglob("*.cu")), *sorted((templates / "host").glob("*.cu")))
    return {
        f"mbc_{whole or short}": path.name
        for path in files
        for whole, short in _DEFINITION.findall(path.read_text(encoding="utf-8"))
    }
