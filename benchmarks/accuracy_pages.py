"""A table of test accuracies beside PyTorch's (`results/textures.json`), for `pictures.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERDICTS = {True: "yes", False: "no", None: "-"}


def accuracy_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return no pictures, and the part of the page; nothing for results that are not of pairs."""
    path = results / "textures.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    rows = [row for row in document["rows"] if "difference" in row]
    if not rows:
        return {}, []
    head = [
        "training",
        "pairs",
        "mbc, %",
        "PyTorch, %",
        "difference",
        "standard error",
        "difference in standard errors",
        "at most two below",
    ]
    lines = [head, ["---"] * len(head), *map(_line, rows)]
    return {}, [
        "## Test accuracy beside PyTorch", "",
        f"{document['gpu'] or 'no GPU'}, driver {document['driver'] or '-'}, {document['date'][:10]}: "
        f"`{document['command']}`. "
        "ResNet-18 on patches of twelve pictures, trained with label smoothing, Nesterov momentum, clipping and moving "
        "averages. Both trainings of a pair begin with the same weights and see the same mini-batches in the same "
        "order; `own`: each draws its crops and flips, `shared`: both get those that the host drew.", "",
        *("| " + " | ".join(line) + " |" for line in lines), "",
    ]  # fmt: skip


def _line(row: Mapping[str, Any]) -> list[str]:
    error, errors = "-", "-"
    if row["standard_error"]:
        error = f"{100 * row['standard_error']:.2f}"
        errors = f"{row['difference'] / row['standard_error']:+.1f}"
    return [
        row["name"], str(row["pairs"]), f"{100 * row['mean']:.1f}", f"{100 * row['torch_mean']:.1f}",
        f"{100 * row['difference']:+.2f}", error, errors, VERDICTS[row["passed"]],
    ]  # fmt: skip
