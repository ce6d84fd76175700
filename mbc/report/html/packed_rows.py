"""Rows as columns: a page has thousands of rows, and most of their texts occur in many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any


class Texts:
    """Texts by index, each stored once."""

    def __init__(self) -> None:
        """Start without texts."""
        self._index: dict[str, int] = {}

    @property
    def all(self) -> list[str]:
        """Every text, in the order of the indices."""
        return list(self._index)

    def table(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return columns of one length, with indices in place of texts.

        `texts` of the result names the columns of texts, `lists` those of lists of texts.
        """
        result = dict(columns)
        texts = [name for name, column in columns.items() if column and all(isinstance(cell, str) for cell in column)]
        lists = [name for name, column in columns.items() if _are_lists(column)]
        for name in texts:
            result[name] = self._indices(columns[name])
        for name in lists:
            result[name] = [self._indices(cell) if cell else cell for cell in columns[name]]
        return {"count": len(next(iter(columns.values()))), "texts": texts, "lists": lists, "columns": result}

    def records(self, kind: type[Any], rows: Sequence[Any], **more: Sequence[Any]) -> dict[str, Any]:
        """Return the table of instances of a dataclass: a column for each field, then the columns of `more`."""
        return self.table({field.name: list(map(attrgetter(field.name), rows)) for field in fields(kind)} | more)

    def _indices(self, cells: Sequence[str]) -> list[int]:
        index = self._index
        return [index.setdefault(cell, len(index)) for cell in cells]


def _are_lists(column: Sequence[Any]) -> bool:
    """Return whether a column has lists of texts, some of which may be empty."""
    return any(column) and all(
        isinstance(cell, list | tuple) and all(isinstance(part, str) for part in cell)  # pyright: ignore[reportUnknownVariableType]
        for cell in column
    )


def rows_of(table: Mapping[str, Any], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table again, as the page reads them."""
    columns: dict[str, Sequence[Any]] = dict(table["columns"])
    for name in table["texts"]:
        columns[name] = [texts[cell] for cell in columns[name]]
    for name in table["lists"]:
        columns[name] = [[texts[part] for part in cell] for cell in columns[name]]
    return [{name: column[i] for name, column in columns.items()} for i in range(table["count"])]
