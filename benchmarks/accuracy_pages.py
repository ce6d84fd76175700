"""A table of test accuracies beside PyTorch's (`results/textures.json`), for `pictures.py`."""

from __future__ import annotations

from pathlib import Path

from tables import Columns, document, entry, table_of, where

VERDICTS = {True: "yes", False: "no", None: "-"}
COLUMNS: Columns = {
    "training": entry("name"),
    "pairs": entry("pairs"),
    "mbc": entry("mean", ".1%"),
    "PyTorch": entry("torch_mean", ".1%"),
    "difference, points": lambda row: f"{100 * row['difference']:+.2f}",
    "standard error": lambda row: f"{100 * row['standard_error']:.2f}",
    "difference in standard errors": lambda row: f"{row['difference'] / row['standard_error']:+.1f}",
    "at most two below": lambda row: VERDICTS[row["passed"]],
}


def accuracy_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return no pictures and this section of the page. The section is empty if the results have no pairs."""
    file = document(results, "textures") or {"rows": []}
    rows = [row for row in file["rows"] if "difference" in row]
    if not rows:
        return {}, []
    return {}, [
        "## Test accuracy beside PyTorch", "",
        f"{where(file)}. ResNet-18 on patches of twelve pictures, trained with label smoothing, Nesterov momentum, "
        "clipping and moving averages. Both trainings of a pair begin with the same weights and see the same "
        "mini-batches in the same order; `own`: each draws its crops and flips, `shared`: both get those that the host "
        "drew.", "",
        *table_of(COLUMNS, rows),
    ]  # fmt: skip
