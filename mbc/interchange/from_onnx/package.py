"""The package `onnx`: an extra, imported where a file of it is read or written, and nowhere else."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from mbc.errors import MbcError


@cache
def onnx(module: str = "onnx") -> Any:
    """A module of the package. Raises MBC349 where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MbcError(
            "MBC349",
            f"ONNX files need the package onnx, which cannot be imported here ({error})",
            "install it: pip install 'mbc-compiler[onnx]'",
        ) from error
