"""Choose the cases of kernels that `make test` runs: cheap ones that together reach what all small cases reach.

What is reached is every basic block of a kernel's code and every outcome of a comparison (smaller, equal, larger), in
each type and layout for which the code is compiled. Write the choice anew after a kernel got a branch, or new cases:

    python -m tests.kernels.cuda.branches
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mbc.ir.types import Precision
from mbc.kernels.base import DTYPE_CODES
from mbc.ops.base import Array
from tests.kernels.cuda.cases import Case
from tests.kernels.cuda.launching import Library, Trial
from tests.kernels.cuda.matrix import CHOICE, counts_of, elements, id_of, is_small, kernels_of
from tests.kernels.cuda.test_emulated import COVERED, PAIRS, build

Pair = tuple[Case, Precision]


def features(library: Library, case: Case, precision: Precision) -> Array:
    """Return the numbers of the blocks and outcomes that a case reaches, in every layout and variant."""
    library.handle.mbc_forget()
    trial = Trial(library, case, precision)
    for candidate in trial.candidates():
        for variant in trial.variants(candidate):
            trial.run(candidate, variant)
    start = ctypes.POINTER(ctypes.c_uint8)()
    size = library.handle.mbc_covered(ctypes.byref(start))
    seen = np.ctypeslib.as_array(start, (size,))
    places = np.flatnonzero(seen)
    return np.concatenate([places[(seen[places] & bit) > 0] * 16 + bit for bit in (1, 2, 4, 8)])


def cheapest(reached: dict[Pair, Array], cost: Callable[[Pair], float]) -> list[Pair]:
    """Return pairs that together reach everything, cheap ones first, none of which is superfluous."""
    everything, numbers = np.unique(np.concatenate(list(reached.values())), return_inverse=True)
    lengths = np.cumsum([len(places) for places in reached.values()])[:-1]
    places_of = dict(zip(reached, np.split(numbers, lengths), strict=True))
    counts = np.zeros(len(everything), np.int64)
    kept: list[Pair] = []
    for pair in sorted(reached, key=cost):
        if (counts[places_of[pair]] == 0).any():
            counts[places_of[pair]] += 1
            kept.append(pair)
    for pair in sorted(kept, key=cost, reverse=True):
        if (counts[places_of[pair]] > 1).all():
            counts[places_of[pair]] -= 1
            kept.remove(pair)
    return kept


def main() -> None:
    """Write the choice."""
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder), DTYPE_CODES["bf16"], flags=COVERED)
        library.handle.mbc_covered.restype = ctypes.c_size_t
        reached = {(c, p): features(library, c, p) for c, p in PAIRS if is_small(c) and kernels_of(c, p)}
    counts = counts_of(PAIRS)
    quick: dict[str, list[str]] = {kind: [] for kind in sorted(counts)}
    for case, precision in cheapest(reached, lambda pair: elements(pair[0])):
        quick[case.kind].append(id_of(case, precision))
    rows = [f'"{kind}": {json.dumps([counts[kind], *sorted(ids)])}' for kind, ids in quick.items()]
    CHOICE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print(f"{sum(map(len, quick.values()))} of {len(reached)} cases")


if __name__ == "__main__":
    main()
