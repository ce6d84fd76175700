"""Rows as columns: a page has thousands of rows, and most of their texts occur in many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Texts:
    """Texts by their index, each once."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def index(self, text: str) -> int:
        """Of a text, which is added where it is new."""
        return self._index.setdefault(text, len(self._index))

    @property
    def all(self) -> list[str]:
        """Every text, in the order of the indices."""
        return list(self._index)

    def table(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, Any]:
        """`columns` of `rows`, each as one list. `texts` names those that hold indices in place of texts."""
        found: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in columns}
        texts = [name for name, column in found.items() if column and all(isinstance(cell, str) for cell in column)]
        for name in texts:
            found[name] = [self.index(cell) for cell in found[name]]
        return {"count": len(rows), "texts": texts, "columns": found}


def rows_of(table: Mapping[str, Any], texts: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a table again, as the page reads them."""
    columns: Mapping[str, Sequence[Any]] = table["columns"]
    cells = {
        name: [texts[cell] for cell in column] if name in table["texts"] else column for name, column in columns.items()
    }
    return [{name: column[i] for name, column in cells.items()} for i in range(table["count"])]
