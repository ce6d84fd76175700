"""Arguments of the commands for whoever writes sources."""

from __future__ import annotations

from mbc.cli.arguments.shared import Commands, command

SHELLS = ("bash", "zsh", "fish")


def add_fmt(commands: Commands) -> None:
    made = command(
        commands, "fmt", "Lay sources out: indentation, and the blanks between tokens.",
        "  mbc fmt net.mbc                 in place\n"
        "  mbc fmt --check *.mbc           which are not laid out so: exit code 1 where one is not\n"
        "  mbc fmt - < net.mbc             from stdin to stdout\n\n"
        "Comments, line breaks and single blank lines stay. A source that cannot be parsed is left as it is.",
    )  # fmt: skip
    made.add_argument("sources", nargs="+", metavar="FILE", help="a source (.mbc), or - for stdin, printed to stdout")
    to = made.add_mutually_exclusive_group()
    to.add_argument("--check", action="store_true", help="write nothing, and name the files that would change")
    to.add_argument("--stdout", action="store_true", help="print the sources instead of writing them")


def add_completions(commands: Commands) -> None:
    made = command(
        commands, "completions", "Print the completions of a shell: commands, options and what options may be.",
        "  mbc completions bash                                            eval its output in ~/.bashrc\n"
        "  mbc completions zsh > ~/.zfunc/_mbc                             with ~/.zfunc in $fpath, before compinit\n"
        "  mbc completions fish > ~/.config/fish/completions/mbc.fish",
    )  # fmt: skip
    made.add_argument("shell", choices=SHELLS)


def add_lsp(commands: Commands) -> None:
    made = command(
        commands, "lsp", "Serve an editor by the Language Server Protocol, over stdin and stdout.",
        "  mbc lsp\n  mbc lsp --gpu a100-80\n\n"
        "Mistakes, shapes, bytes and predicted times of lines, completion, definitions and the layout of mbc fmt.",
    )  # fmt: skip
    made.add_argument(
        "--gpu", default="auto", help="GPU to predict times for (see mbc gpus; default: this machine's, else h200)"
    )
    made.add_argument("--stdio", action="store_true", help="taken for editors that give it: there is no other way")
