"""The command `mbc completions`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from typing import cast

from mbc.cli.arguments.described import Described, Option


def run(arguments: argparse.Namespace) -> int:
    """Print the completions of a shell."""
    print(completions(arguments.shell), end="")
    return 0


def completions(shell: str) -> str:
    """Return the completion script of a shell (bash, zsh or fish), generated from the argument parsers."""
    import jinja2

    from mbc.cli.arguments import parser
    from mbc.resources import folder

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder("templates") / "completions"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the filters quote whatever is text
    )
    filters = cast(dict[str, Callable[..., str]], environment.filters)  # pyright: ignore[reportUnknownMemberType]
    filters |= {"quoted": shlex.quote, "fish_quoted": _fish_quoted, "zsh_spec": _zsh_spec, "bash_cases": _bash_cases}
    return environment.get_template(f"{shell}.j2").render(commands=parser().described().all())


def _bash_cases(options: Sequence[Option], command: Described) -> str:
    """Return the patterns of a command's options, such as `compile --policy`."""
    return "|".join(shlex.quote(" ".join((*command.path, name))) for option in options for name in option.names)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _zsh_spec(option: Option, name: str) -> str:
    """Return the `_arguments` spec of zsh for a name of an option; options exclude none, as many may be repeated."""
    text = f"[{_zsh_text(option.help)}]"
    if option.value is None:
        return f"*{name}{text}"
    words = " ".join(option.words)
    action = f"_values -s , item {words}" if option.several else f"({words})" if words else "_files"
    equals = "=" if name.startswith("--") else ""
    return f"*{name}{equals}{text}:{_zsh_text(option.value)}:{action}"


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)
