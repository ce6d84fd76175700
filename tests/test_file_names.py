"""The base names of Python files in `mbc/`: a name says what a file holds, and only mirrors share a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1] / "mbc"
MOST_SHARED_NAMES = 1  # this number only falls

REPORT = PurePosixPath("report")
# Groups of parallel folders. Files of one name are mirrors if their folders are in one group.
PARALLEL: Mapping[str, Sequence[str]] = {
    "a family of operations: its meaning, its kernels, its import and its export": (
        "ops",
        "kernels/cuda",  # and the folders in it
        "interchange/aten",
        "interchange/from_onnx",
        "interchange/to_onnx",
    ),
    "the two files of a compilation, its profile and its plan": ("plan", "profile"),
}


def base_names(files: Iterable[PurePosixPath]) -> dict[str, list[PurePosixPath]]:
    """Return the folders of the files of each base name, without the indexes of packages."""
    folders: dict[str, list[PurePosixPath]] = {}
    for file in files:
        if file.name not in ("__init__.py", "__main__.py"):
            folders.setdefault(file.stem, []).append(file.parent)
    return folders


def group(folder: PurePosixPath) -> str | None:
    """Return the group of parallel folders that a folder belongs to."""
    for name, members in PARALLEL.items():
        if any(folder.is_relative_to(member) for member in members):
            return name
    return None


def are_mirrors(one: PurePosixPath, other: PurePosixPath) -> bool:
    """Return whether two files of one name in these folders have one role.

    This is so if the folders are parallel, or if one of them is `report`: `report/fit` prints the results of `fit`.
    """
    if REPORT in (one, other):
        return not (one.is_relative_to(REPORT) and other.is_relative_to(REPORT))
    return group(one) is not None and group(one) == group(other)


def shared_names(files: Iterable[PurePosixPath]) -> list[str]:
    """Return the base names of two or more files that are not all mirrors of each other."""
    return sorted(
        name
        for name, folders in base_names(files).items()
        if any(not are_mirrors(one, other) for i, one in enumerate(folders) for other in folders[:i])
    )


def test_only_mirrors_share_a_base_name():
    """Check that a reader who looks for a file by its name finds one file, or files of one role.

    Two files of one name are mirrors if their folders are parallel (`PARALLEL`, or `report` and the folder of what it
    prints). Each other name is shared by files of different roles: give one of them a name that says what it holds.
    """
    names = shared_names(PurePosixPath(path.relative_to(ROOT).as_posix()) for path in ROOT.rglob("*.py"))
    assert len(names) <= MOST_SHARED_NAMES, names


def test_mirrors_are_distinguished_from_files_of_other_roles():
    mirrors = ("ops/pool.py", "kernels/cuda/pooling/pool.py", "plan/memory.py", "report/memory.py", "fit.py")
    others = ("ops/loss.py", "runtime/loss.py", "report/html/rows.py", "report/rows.py")
    files = [PurePosixPath(name) for name in (*mirrors, *others)]
    assert shared_names(files) == ["loss", "rows"]
    assert shared_names([PurePosixPath("plan/__init__.py"), PurePosixPath("ops/__init__.py")]) == []
