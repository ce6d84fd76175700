"""The file of `mbc train --settings FILE`, with options of a training as lines NAME=VALUE.

`mbc tune -o FILE` writes such a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mbc import files
from mbc.errors import MbcError

OPTION = "--settings"
NAMES = ("set", "gpus", "epochs", "lr", "schedule", "warmup", "seed")  # options of `mbc train`
MOST_BYTES = 1 << 20


def with_settings(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the options of the `--settings` file of `mbc train` before all others.

    Options on the command line come later and so take precedence over those of the file. The words of other commands
    do not change.

    Raises:
        MbcError: MBC317, the file cannot be read or has a line that is not an option of a training.
    """
    merged = list(words)
    if words[:1] != ["train"]:
        return merged
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == OPTION and (equals or at + 1 < len(words)):
            merged[1:1] = _words(Path(value if equals else words[at + 1]))
    return merged


def settings_text(settings: Sequence[tuple[str, str]], title: str) -> str:
    """Return the text of a settings file."""
    return "".join([f"# {title}\n", *(f"{name}={value}\n" for name, value in settings)])


def _words(file: Path) -> list[str]:
    try:
        lines = files.read_text(file, MOST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(file, f"cannot read '{file}': {getattr(error, 'strerror', None) or error}") from error
    words: list[str] = []
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        if not line.strip() or line.startswith("#"):
            continue
        if not equals or name.strip() not in NAMES or not value.strip():
            raise _refused(file, f"line {number} of '{file}' is no setting of a training: {line[:60]!r}")
        words += [f"--{name.strip()}={value.strip()}"]
    return words


def _refused(file: Path, problem: str) -> MbcError:
    return MbcError("MBC317", problem, f"give a file that mbc tune -o wrote: NAME=VALUE, of {', '.join(NAMES)}")
