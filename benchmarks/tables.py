"""Markdown tables of results files, for `pictures.py` and the modules of its pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]


def document(results: Path, name: str) -> dict[str, Any] | None:
    """Return the results file of this name, or None if there is none."""
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def rows_of(results: Path, name: str) -> list[Row]:
    """Return the rows of a results file; none if there is no file."""
    rows: Sequence[Any] = (document(results, name) or {}).get("rows", ())
    return [row for row in rows if isinstance(row, dict)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty line after them."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def table_of(columns: Columns, rows: Sequence[Row]) -> list[str]:
    """Return a table of the rows without empty columns, and the failures below it."""
    cells = {head: [_cell(text, row) for row in rows] for head, text in columns.items()}
    kept = [head for head, texts in cells.items() if any(text != "-" for text in texts)]
    failed = [f"{row['name']} failed: {shorten(row['failed'], 120)}" for row in rows if "failed" in row]
    lines = table(kept, ([cells[head][i] for head in kept] for i in range(len(rows))))
    return [*lines, *(line for why in failed for line in (why, ""))]


def _cell(text: Callable[[Row], str], row: Row) -> str:
    try:
        return text(row)
    except (KeyError, TypeError):
        return "-"


def entry(key: str, form: str = "") -> Callable[[Row], str]:
    """Return the text of a row's entry in a format."""
    return lambda row: format(row[key], form)


def where(file: Mapping[str, Any]) -> str:
    """Return the machine, the date and the command of a results file."""
    machine = f"{file['gpu'] or 'no GPU'}, driver {file['driver'] or '-'}"
    return f"{machine}, {file['date'][:10]}: `{file['command']}`"
