"""Paths of profiles: those that are part of mbc, and those that the user measured."""

from __future__ import annotations

import os
from pathlib import Path

COMPRESSED = ".gz"  # suffix of a compressed file: it can be read, but not added to
BUNDLED = Path(__file__).resolve().parent.parent / "data" / "profiles"


def file_name(gpu: str) -> str:
    """Return the file name of the profile of the GPU that the driver calls `gpu`."""
    words = "".join(c if c.isalnum() else " " for c in gpu.lower().replace("nvidia", "")).split()
    return "-".join(words) + ".sqlite"


def user_path(gpu: str) -> Path:
    """Return the path of a user's own measurements of a GPU: under XDG_DATA_HOME, else ~/.local/share."""
    root = os.environ.get("XDG_DATA_HOME")
    return (Path(root) if root else Path.home() / ".local" / "share") / "mbc" / "profiles" / file_name(gpu)


def bundled_path(gpu: str) -> Path:
    """Return the path of the bundled profile of a GPU, which may not exist."""
    return BUNDLED / f"{file_name(gpu)}{COMPRESSED}"


def known_profiles() -> tuple[Path, ...]:
    """Return the files of all the user's own profiles and of the bundled ones."""
    own = user_path("any").parent
    return (*sorted(own.glob("*.sqlite")), *sorted(BUNDLED.glob(f"*.sqlite{COMPRESSED}")))
