"""The package `onnx`, which is optional: only the functions that read or write ONNX files import it."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from mbc.errors import MbcError


@cache
def onnx(module: str = "onnx") -> Any:
    """Return a module of the package.

    Raises:
        MbcError: MBC349 if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MbcError(
            "MBC349",
            f"ONNX files need the package onnx, which cannot be imported here ({error})",
            "install it: pip install 'mbc-compiler[onnx]'",
        ) from error
