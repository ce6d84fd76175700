"""Where commands write: not over what they read, nor over a source or data, nor over one another."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from mbc.errors import MbcError

# What people write or gather, by how its name ends; nothing that these commands write is called so.
_OF_PEOPLE = {
    ".mbc": "a source",
    ".npz": "data",
    ".npy": "data",
    ".py": "a program",
    ".pt2": "a model",
    ".onnx": "a model",
}


def check_outputs(outputs: Mapping[str, Path | str | None], inputs: Mapping[str, Path | str | None]) -> None:
    """Both by the option or word that names them, None where there is none. MBC370 where an output would take the place
    of an input, or is called as a source or data are, MBC371 where two outputs are one file: better known before
    anything is planned."""
    written = {option: Path(place) for option, place in outputs.items() if place is not None}
    read = {option: Path(place) for option, place in inputs.items() if place is not None}
    for option, path in written.items():
        if (kind := _OF_PEOPLE.get(path.suffix.lower())) is not None:
            raise MbcError(
                "MBC370", f"{option} '{path}' is called as {kind} is, which it would replace",
                f"name it otherwise than with {path.suffix}",
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
    """What is written of a package, a plan or a source is called, here: `r50_4.html` of the folder r50_4, `net.html` of
    net.mbc."""
    path = Path(place).resolve()
    return f"{path.name if path.is_dir() else path.stem}{ending}"


def _same(one: Path, other: Path) -> bool:
    """Whether both are one file, whichever of them exists already."""
    try:
        return one.samefile(other)
    except OSError:
        return one.absolute() == other.absolute()
