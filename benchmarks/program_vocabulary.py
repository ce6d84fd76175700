"""The operations from which random programs are drawn. Each is a function that writes one operation into a draft.

A function returns an expression, which the draft gives a name, or writes statements itself. Families have weights:
views and writes in place are a third of all operations, because imports computed wrong results most often there. All
operations that few models use form one family, so that refusals of them do not keep out most programs.
"""

from __future__ import annotations

import program_arithmetic
import program_layers
import program_views
from program_draft import Draft, Draw

WEIGHTS = {
    "view": 20, "in place": 16, "layer": 16, "activation": 16, "arithmetic": 12, "reduction": 5, "join": 5,
    "resample": 4, "region": 3, "matrix": 2, "rare": 5,
}  # fmt: skip
FAMILIES: dict[str, list[Draw]] = {family: [] for family in WEIGHTS}
for _module in (program_arithmetic, program_layers, program_views):
    for _draw in [*vars(_module).values(), *getattr(_module, "SIMPLE", ())]:
        if hasattr(_draw, "family"):
            FAMILIES[_draw.family].append(_draw)


def draw_operation(draft: Draft) -> bool:
    """Draw one operation of one family. Return False if the operation cannot be drawn here."""
    family = draft.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    return draft.attempt(draft.one_of(*FAMILIES[family]))
