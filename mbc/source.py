"""Source text, and places in it."""

from __future__ import annotations

from dataclasses import dataclass, field


def visible(text: str) -> str:
    r"""Return the text with characters that a terminal acts on or does not show as escapes (`\x1b`, `\u202e`).

    These are control characters other than tabs and line ends, bidirectional marks, and spaces without width. So text
    of any origin can be shown.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Source:
    """A whole source file; messages call it `name`."""

    name: str
    text: str = field(repr=False)

    def line(self, number: int) -> str:
        """Return line `number`, counted from 1, without its end."""
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of `length` characters in one line; `line` and `column` count from 1."""

    source: Source
    line: int
    column: int
    length: int = 1

    def render(self) -> str:
        """Return file, line and column, then the line with carets under the span."""
        line = self.source.line(self.line)
        start = self.column - 1
        before, within, behind = (visible(part) for part in _parted(line, start, start + max(1, self.length)))
        gutter = f"{self.line:>5} | "
        # Tabs are kept so that the carets are under the text in any terminal.
        indent = "".join("\t" if c == "\t" else " " for c in before)
        carets = "^" * max(1, len(within))
        return (
            f"  --> {self.source.name}:{self.line}:{self.column}\n"
            f"{gutter}{before}{within}{behind}\n{' ' * (len(gutter) - 2)}| {indent}{carets}"
        )


def _parted(text: str, start: int, stop: int) -> tuple[str, str, str]:
    return text[:start], text[start:stop], text[stop:]
