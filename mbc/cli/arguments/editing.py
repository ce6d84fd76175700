"""Arguments of the commands for people who write sources."""

from __future__ import annotations

from mbc.cli.arguments.shared import Commands, command

SHELLS = ("bash", "zsh", "fish")


def add_fmt(commands: Commands) -> None:
    """Add `mbc fmt`."""
    parser = command(
        commands, "fmt", "Format sources: indentation, and the blanks between tokens.",
        "  mbc fmt net.mbc                 in place\n"
        "  mbc fmt --check *.mbc           list files that are not formatted; exit code 1 if there are any\n"
        "  mbc fmt - < net.mbc             from stdin to stdout\n\n"
        "Comments, line breaks and single blank lines stay. A source that cannot be parsed stays unchanged.",
    )  # fmt: skip
    parser.add_argument("sources", nargs="+", metavar="FILE", help="a source (.mbc), or - for stdin, printed to stdout")
    to = parser.add_mutually_exclusive_group()
    to.add_argument("--check", action="store_true", help="write nothing, and name the files that would change")
    to.add_argument("--stdout", action="store_true", help="print the sources instead of writing them")


def add_completions(commands: Commands) -> None:
    """Add `mbc completions`."""
    parser = command(
        commands, "completions", "Print the completions of a shell: commands, options and their values.",
        "  mbc completions bash                                            eval its output in ~/.bashrc\n"
        "  mbc completions zsh > ~/.zfunc/_mbc                             with ~/.zfunc in $fpath, before compinit\n"
        "  mbc completions fish > ~/.config/fish/completions/mbc.fish",
    )  # fmt: skip
    parser.add_argument("shell", choices=SHELLS)


def add_lsp(commands: Commands) -> None:
    """Add `mbc lsp`."""
    parser = command(
        commands, "lsp", "Serve an editor by the Language Server Protocol, over stdin and stdout.",
        "  mbc lsp\n  mbc lsp --gpu a100-80\n\n"
        "It shows errors, shapes, bytes and predicted times of lines, and offers completion, definitions and mbc fmt.",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", default="auto", help="GPU to predict times for (see mbc gpus; default: this machine's, else h200)"
    )
    parser.add_argument(
        "--stdio", action="store_true", help="accepted because some editors give it; the server always uses stdio"
    )
