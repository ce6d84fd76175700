"""A parser as plain data, from which completions of shells are generated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command.

    Attributes:
        names: All names, such as `-o` and `--output`.
        help: Help text.
        value: Name of its value in the help text; None for an option without a value.
        words: All possible values, or all possible items of a comma-separated list; empty if any text is allowed.
        several: Whether the value is a comma-separated list.
    """

    names: tuple[str, ...]
    help: str
    value: str | None
    words: tuple[str, ...]
    several: bool


@dataclass(frozen=True, slots=True)
class Described:
    """A command or a subcommand.

    Attributes:
        path: Words that lead to it, without the program's name.
        help: Help text.
        options: Options that it takes.
        words: All possible values of its positional arguments; empty if they are files.
        commands: Its subcommands.
        implied: Subcommand that runs where none of `commands` is named.
    """

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    commands: tuple[Described, ...]
    implied: str

    @property
    def name(self) -> str:
        """Last word of the path; empty for the whole command line."""
        return self.path[-1] if self.path else ""

    def all(self) -> tuple[Described, ...]:
        """Return this command and all commands below it."""
        return (self, *(inner for command in self.commands for inner in command.all()))
