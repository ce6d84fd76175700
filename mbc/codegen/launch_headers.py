"""Headers with the integers and the operands of launches, which are generated wherever sources are written."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from mbc import kernels
from mbc.kernels.base import DTYPE_CODES, LAYOUT_CODES
from mbc.kernels.cuda import KERNELS
from mbc.kernels.launch_operands import Launcher, operands_header
from mbc.kernels.launch_struct import header, header_name, structs_of


@functools.cache
def launch_headers() -> Mapping[str, str]:
    """Return the text of every generated header by its name."""
    names = (info.name for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."))
    modules = map(importlib.import_module, names)
    headers = {header_name(m.__name__): header(m) for m in modules if structs_of(m)}
    return MappingProxyType({"mbc_types.h": _types(), **headers, **_operands()})


def _operands() -> dict[str, str]:
    """Return the headers of the sources that read operands by name."""
    launchers: dict[str, dict[str, Launcher]] = {}
    for kernel in KERNELS.values():
        if kernel.operands:
            for file, launcher in zip(kernel.files, kernel.launchers, strict=True):
                launchers.setdefault(Path(file).stem, {})[launcher.function] = launcher
    return {f"{source}_operands.h": operands_header(source, list(of.values())) for source, of in launchers.items()}


def _types() -> str:
    """Return the header with the codes of types and layouts."""
    types = ", ".join(f"MBC_{name.upper()} = {code}" for name, code in DTYPE_CODES.items())
    layouts = ", ".join(f"MBC_{layout.name} = {code}" for layout, code in LAYOUT_CODES.items())
    return (
        "// Codes of element types and layouts in the integers of a launch, generated from mbc/kernels/base.py.\n"
        "#pragma once\n\n#include <cstdint>\n\n"
        f"enum MbcType : int64_t {{ {types} }};\nenum MbcLayout : int64_t {{ {layouts} }};\n"
    )


def write_launch_headers(folder: Path) -> None:
    """Write every generated header into a folder of sources."""
    for name, text in launch_headers().items():
        (folder / name).write_text(text, encoding="utf-8")
