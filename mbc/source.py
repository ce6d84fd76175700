"""Source text and places in it."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        text = self.source.line(self.line)
        gutter = f"{self.line:>5} | "
        # Tabs are kept so that the carets stand under the text in any terminal.
        indent = "".join("\t" if c == "\t" else " " for c in text[: self.column - 1])
        carets = "^" * max(1, min(self.length, len(text) - self.column + 1))
        return (
            f"  --> {self.source.name}:{self.line}:{self.column}\n"
            f"{gutter}{text}\n{' ' * (len(gutter) - 2)}| {indent}{carets}"
        )
