"""What a parser takes, as plain data: what completions of shells are generated from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """`names`: all of them, as `-o` and `--output`; `value`: what its value is called, None where it takes none;
    `words`: all that the value may be, or, of a list parted by commas, its items."""

    names: tuple[str, ...]
    help: str
    value: str | None
    words: tuple[str, ...]
    several: bool


@dataclass(frozen=True, slots=True)
class Described:
    """A command, or one of its own commands. `words`: what its arguments may be, where they are no files; `implied`:
    the command that is meant where none of `commands` is named."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    commands: tuple[Described, ...]
    implied: str

    @property
    def name(self) -> str:
        return self.path[-1] if self.path else ""

    def all(self) -> tuple[Described, ...]:
        """This one and those inside of it."""
        return (self, *(inner for command in self.commands for inner in command.all()))
