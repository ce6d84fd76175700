"""Where the files that are not Python lie: in a checkout (also an editable install) and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """`templates` or `grammar`: at the top of a checkout, inside the package in a wheel."""
    # The package's own first: in site-packages a folder of that name beside it would be somebody else's.
    for root in (_PACKAGE, _PACKAGE.parent):
        if (root / name).is_dir():
            return root / name
    raise FileNotFoundError(f"mbc is installed without its '{name}' folder: reinstall mbc-compiler")


def data_text(name: str) -> str:
    """A file of the package's own data folder."""
    return (_PACKAGE / "data" / name).read_text(encoding="utf-8")
