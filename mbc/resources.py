"""Finds files that are not Python, in a checkout (also an editable install) and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Return the folder `templates` or `grammar`: at the top of a checkout, inside the package in a wheel.

    Raises:
        FileNotFoundError: The installation lacks the folder.
    """
    # The package's own folder first: in site-packages a folder of that name beside it belongs to another package.
    for root in (_PACKAGE, _PACKAGE.parent):
        if (root / name).is_dir():
            return root / name
    raise FileNotFoundError(f"mbc is installed without its '{name}' folder: reinstall mbc-compiler")


def data_text(name: str) -> str:
    """Return the text of a file in the package's data folder."""
    return (_PACKAGE / "data" / name).read_text(encoding="utf-8")
