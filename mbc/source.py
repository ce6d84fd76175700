"""Source text and places in it."""

from __future__ import annotations

from dataclasses import dataclass, field


def visible(text: str) -> str:
    """The text with what a terminal would act on, or not show, as escapes (`\\x1b`, `\\u202e`): control characters,
    but for tabs and line ends, bidirectional marks, spaces of no width. Whatever others wrote may be shown so."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Source:
    """A whole source file; `name` is what messages call it."""

    name: str
    text: str = field(repr=False)

    def line(self, number: int) -> str:
        """Line `number`, counted from 1, without its end."""
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """`length` characters of one line. `line` and `column` count from 1."""

    source: Source
    line: int
    column: int
    length: int = 1

    def render(self) -> str:
        """File, line and column, then the line with carets under the span."""
        line = self.source.line(self.line)
        start = self.column - 1
        before, within, behind = (visible(part) for part in _parted(line, start, start + max(1, self.length)))
        gutter = f"{self.line:>5} | "
        # Tabs are kept so that the carets stand under the text in any terminal.
        indent = "".join("\t" if c == "\t" else " " for c in before)
        carets = "^" * max(1, len(within))
        return (
            f"  --> {self.source.name}:{self.line}:{self.column}\n"
            f"{gutter}{before}{within}{behind}\n{' ' * (len(gutter) - 2)}| {indent}{carets}"
        )


def _parted(text: str, start: int, stop: int) -> tuple[str, str, str]:
    return text[:start], text[start:stop], text[stop:]
