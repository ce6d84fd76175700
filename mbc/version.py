"""The version of mbc, and the folder of the package that this process runs."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.2.0.dev0"

PACKAGE = Path(__file__).resolve().parent
