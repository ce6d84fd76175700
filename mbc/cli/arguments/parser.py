"""argparse with short errors: what is wrong in one line, what would be right in the next."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

from mbc.cli.arguments.argument_types import SomeOf
from mbc.cli.arguments.described import Described, Option
from mbc.frontend.near import nearest
from mbc.source import visible


class Parser(argparse.ArgumentParser):
    """Ends with exit code 2 and two lines where the command line is wrong, without a page of usage."""

    def error(self, message: str) -> NoReturn:
        wrong, _, remedy = message.partition("\n")
        remedy = remedy or f"{self.prog} --help says what it takes"
        self.exit(2, visible(f"{self.prog}: error: {wrong}\nhelp: {remedy}\n"))

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, extras = super().parse_known_args(args, namespace)
        if extras:  # told here, where it is known which command they are given to
            self.error(self._surplus(extras[0]))
        return found, extras

    def described(self, path: tuple[str, ...] = ()) -> Described:
        """What this parser takes; `path`: the words that lead to it, without the program's name."""
        options: list[Option] = []
        words: list[str] = []
        commands: list[Described] = []
        for action in self._actions:
            choices = cast(object, action.choices)
            if isinstance(choices, Mapping):
                parsers = cast(Mapping[str, Parser], choices)
                commands += [parser.described((*path, name)) for name, parser in parsers.items()]
            elif action.option_strings:
                options.append(self._option(action))
            else:
                words += _words(action)
        implied = str(self.get_default("implied") or "")
        return Described(path, self.description or "", tuple(options), tuple(words), tuple(commands), implied)

    def _option(self, action: argparse.Action) -> Option:
        text = (action.help or "") % {**vars(action), "prog": self.prog}
        takes = None if action.nargs == 0 else str(action.metavar or action.dest)
        several = isinstance(action.type, SomeOf)
        return Option(tuple(action.option_strings), text, takes, _words(action), several)

    def _surplus(self, word: str) -> str:
        if not word.startswith("-"):
            return f"nothing is expected where '{word}' stands"
        name = word.partition("=")[0]
        return f"there is no option {name}{_meant(name, self._option_string_actions, 'option')}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        names = [str(choice) for choice in choices]
        if action.dest == argparse.SUPPRESS or action.metavar in ("COMMAND", "WHAT"):
            raise argparse.ArgumentError(None, f"there is no command '{value}'{_meant(value, names, 'command')}")
        raise argparse.ArgumentError(action, f"'{value}' is none of {', '.join(names)}{_meant(value, names)}")


class Once(argparse.Action):
    """Stores an option's value, and refuses a second one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) != self.default:
            raise argparse.ArgumentError(self, f"given twice, as {getattr(namespace, self.dest)} and as {values}")
        setattr(namespace, self.dest, values)


def _meant(word: str, known: Iterable[str], what: str = "") -> str:
    """The line after the error: the nearest, else the list where `what` names one that is short."""
    names = list(known)
    near = nearest(word, names)
    if near is not None:
        return f"\ndid you mean {near}?"
    return f"\nthe {what}s are {', '.join(names)}" if what == "command" else ""


def _words(action: argparse.Action) -> tuple[str, ...]:
    """What the value, or each item of it, may be; () for whatever."""
    known = action.type.known if isinstance(action.type, SomeOf) else action.choices or ()
    return tuple(map(str, known))
