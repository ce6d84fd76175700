"""Checks of output paths: no output replaces an input of the command, a file that people wrote, or another output."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from mbc.errors import MbcError

# Files that people write or collect, by suffix; no output of a command has such a suffix.
_OF_PEOPLE = {
    ".mbc": "a source",
    ".npz": "data",
    ".npy": "data",
    ".py": "a program",
    ".pt2": "a model",
    ".onnx": "a model",
}


def check_outputs(outputs: Mapping[str, Path | str | None], inputs: Mapping[str, Path | str | None]) -> None:
    """Check the outputs of a command before anything is planned.

    Args:
        outputs: Path of each output, by the option that names it; None if the option is absent.
        inputs: Path of each input, by the word that messages use for it.

    Raises:
        MbcError: MBC370, an output would replace an input, or has the suffix of a source, a model or data; MBC371, two
            outputs are one file.
    """
    written = {option: Path(place) for option, place in outputs.items() if place is not None}
    read = {option: Path(place) for option, place in inputs.items() if place is not None}
    for option, path in written.items():
        if (kind := _OF_PEOPLE.get(path.suffix.lower())) is not None:
            raise MbcError(
                "MBC370", f"{option} '{path}' has the suffix of {kind}, which it could replace",
                f"choose another suffix than {path.suffix}",
            )  # fmt: skip
        for word, other in read.items():
            if _same(path, other):
                raise MbcError(
                    "MBC370", f"{option} '{path}' would replace what {word} names", f"name another file with {option}"
                )
    for (option, path), (another, other) in combinations(written.items(), 2):
        if _same(path, other):
            raise MbcError(
                "MBC371", f"{option} and {another} are one file, '{path}'", f"name another file with {option}"
            )


def default_output(place: str, ending: str) -> str:
    """Return the default name of an output in this folder: `r50_4.html` for the folder r50_4, `net.html` for net.mbc.

    Args:
        place: Package, plan or source that the command reads.
        ending: Suffix of the output.
    """
    path = Path(place).resolve()
    return f"{path.name if path.is_dir() else path.stem}{ending}"


def _same(one: Path, other: Path) -> bool:
    """Return whether both paths name one file, which need not exist."""
    try:
        return one.samefile(other)
    except OSError:
        return one.absolute() == other.absolute()
