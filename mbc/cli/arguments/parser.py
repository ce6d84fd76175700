"""An argparse parser with short errors: one line states the mistake, the next line the correct form."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

from mbc.cli.arguments.argument_types import SomeOf
from mbc.cli.arguments.described import Described, Option
from mbc.frontend.near import nearest
from mbc.source import visible

# Settings of the source that users look for among the options
_SETTINGS = {"--batch": "batch=64", "--memory": "memory.device=8GB", "--precision": "train.precision=bf16"}


class Parser(argparse.ArgumentParser):
    """A parser that ends with exit code 2 and two lines where the command line is wrong, without a page of usage."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2, after the error and a remedy, which `message` has after a line break."""
        wrong, _, remedy = message.partition("\n")
        remedy = remedy or f"{self.prog} --help says what it takes"
        self.exit(2, visible(f"{self.prog}: error: {wrong}\nhelp: {remedy}\n"))

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse arguments as argparse does.

        Report surplus words here, because this parser still knows their command.
        """
        parsed, extras = super().parse_known_args(args, namespace)
        if extras:  # this parser knows the command
            self.error(self._surplus(extras[0]))
        return parsed, extras

    def described(self, path: tuple[str, ...] = ()) -> Described:
        """Return this parser as plain data.

        Args:
            path: Words that lead to this parser, without the program's name.
        """
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
        return Option(tuple(action.option_strings), text, takes, _words(action) or _gpus(action), several)

    def _surplus(self, word: str) -> str:
        if not word.startswith("-"):
            return f"nothing is expected where '{word}' stands"
        name = word.partition("=")[0]
        setting = _SETTINGS.get(name) if "--set" in self._option_string_actions else None
        meant = (
            f"\nwrite --set {setting}, for instance" if setting else _meant(name, self._option_string_actions, "option")
        )
        return f"there is no option {name}{meant}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        names = [str(choice) for choice in choices]
        if action.dest == argparse.SUPPRESS or action.metavar in ("COMMAND", "WHAT"):
            raise argparse.ArgumentError(None, f"there is no command '{value}'{_meant(value, names, 'command')}")
        raise argparse.ArgumentError(action, f"'{value}' is none of {', '.join(names)}{_meant(value, names)}")


class Once(argparse.Action):
    """An action that stores an option's value and refuses a second one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value; raise an argument error where the option was given before."""
        if getattr(namespace, self.dest) != self.default:
            raise argparse.ArgumentError(self, f"given twice, as {getattr(namespace, self.dest)} and as {values}")
        setattr(namespace, self.dest, values)


def _meant(word: str, words: Iterable[str], what: str = "") -> str:
    """Return the line after an error: the most similar word, else the whole list of commands, else nothing."""
    names = list(words)
    if (near := nearest(word, names)) is not None:
        return f"\ndid you mean {near}?"
    return f"\nthe {what}s are {', '.join(names)}" if what == "command" else ""


def _words(action: argparse.Action) -> tuple[str, ...]:
    """Return all possible values of an argument, or all possible items of its list; () where any text is allowed."""
    words = action.type.words if isinstance(action.type, SomeOf) else action.choices or ()
    return tuple(map(str, words))


def _gpus(action: argparse.Action) -> tuple[str, ...]:
    """Return the names of GPUs for an option that takes one; () for other options."""
    if "--gpu" not in action.option_strings or action.metavar is not None:
        return ()
    from mbc.hardware.spec import device_specs  # only completions need the list

    return tuple(device_specs())
