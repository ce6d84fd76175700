"""Heights of placements over a known optimum: blocks are a full rectangle of time and memory, cut at random.

The arena of a placement is asked to be as low as the optimum. `heuristics` are greedy placement, the skyline heuristic
and annealing alone; `height` has the search after them (`mbc/optimize/placement/skyline_search.py`); both over the
optimum. Asked are a median of 1.01 at most, and 1.04 of every one. Needs no GPU.

    python benchmarks/placements.py [--only NAME ...]
    python benchmarks/placements.py --files FILE.csv ...    # id,lower,upper,size, as MiniMalloc's; over peak live bytes
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import attempt, show, start, write

from mbc.optimize.placement.place_blocks import place
from mbc.optimize.schedule.liveness import Block, peak_bytes
from mbc.plan.model import ALIGNMENT_BYTES

HEIGHT = 4096  # of the rectangle, in units of the alignment
COUNTS = range(140, 471, 36)
FIRST_SEED = 1000  # of each way to cut; those that the search was tuned on were below
COLUMNS = ("name", "blocks", "bound", "heuristics", "height", "heuristics_s", "cpu_s", "correct")


@dataclass(frozen=True)
class Rectangle:
    low: int
    high: int
    start: int
    stop: int

    @property
    def area(self) -> int:
        return (self.high - self.low) * (self.stop - self.start)

    def across(self, offset: int) -> tuple[Rectangle, Rectangle]:
        return (
            Rectangle(self.low, self.low + offset, self.start, self.stop),
            Rectangle(self.low + offset, self.high, self.start, self.stop),
        )

    def along(self, launch: int) -> tuple[Rectangle, Rectangle]:
        return (
            Rectangle(self.low, self.high, self.start, launch),
            Rectangle(self.low, self.high, launch, self.stop),
        )


def recursive(draw: random.Random, whole: Rectangle, count: int) -> list[Rectangle]:
    """Cut anywhere, each part with a random share of the blocks: sizes of all orders."""
    if count == 1:
        return [whole]
    cuts = [whole.across(draw.randrange(1, whole.high - whole.low))] if whole.high - whole.low > 1 else []
    cuts += [whole.along(draw.randrange(whole.start + 1, whole.stop))] if whole.stop - whole.start > 1 else []
    if not cuts:
        return [whole]
    first, second = draw.choice(cuts)
    share = draw.randrange(1, count)
    return recursive(draw, first, share) + recursive(draw, second, count - share)


def largest(draw: random.Random, whole: Rectangle, count: int) -> list[Rectangle]:
    """The largest of three parts is cut anywhere: sizes alike."""
    return _split(draw, whole, count, 3, lambda height: draw.randrange(1, height))


def fractions(draw: random.Random, whole: Rectangle, count: int) -> list[Rectangle]:
    """Any part is cut, its size by a simple fraction, as of channels: many sizes equal."""
    shares = (0.1, 0.25, 0.33, 0.5, 0.75, 0.9)
    return _split(draw, whole, count, 1, lambda height: max(1, int(height * draw.choice(shares))))


def _split(
    draw: random.Random, whole: Rectangle, count: int, candidates: int, offset: Callable[[int], int]
) -> list[Rectangle]:
    parts = [whole]
    while len(parts) < count:
        at = max(draw.sample(range(len(parts)), min(candidates, len(parts))), key=lambda i: parts[i].area)
        part = parts[at]
        if draw.random() < 0.5 and part.high - part.low > 1:
            parts[at : at + 1] = part.across(offset(part.high - part.low))
        elif part.stop - part.start > 1:
            parts[at : at + 1] = part.along(draw.randrange(part.start + 1, part.stop))
    return parts


Cut = Callable[[random.Random, Rectangle, int], list[Rectangle]]
CUTS: tuple[Cut, ...] = (recursive, largest, fractions)


def instance(cut: Cut, count: int, seed: int) -> list[Block]:
    draw = random.Random(seed)
    parts = cut(draw, Rectangle(0, HEIGHT, 0, 2 * count), count)
    draw.shuffle(parts)
    return [Block((i,), ALIGNMENT_BYTES * (p.high - p.low), p.start, p.stop) for i, p in enumerate(parts)]


def correct(blocks: Sequence[Block], offsets: Sequence[int], height: int) -> bool:
    """No two blocks that are live at once overlap, and all are within the height."""
    placed = list(zip(blocks, offsets, strict=True))
    return all(0 <= offset <= height - block.size_bytes for block, offset in placed) and not any(
        a.start < b.stop and b.start < a.stop and low < other + b.size_bytes and other < low + a.size_bytes
        for i, (a, low) in enumerate(placed)
        for b, other in placed[:i]
    )


def measured(blocks: Sequence[Block], optimum: int) -> dict[str, Any]:
    """Heights over `optimum`."""
    began = time.process_time()
    _, heuristic = place(blocks)
    middle = time.process_time()
    offsets, height = place(blocks, optimum)
    return {
        "blocks": len(blocks),
        "bound": peak_bytes(blocks)[0] / optimum,
        "heuristics": heuristic / optimum,
        "height": height / optimum,
        "heuristics_s": middle - began,
        "cpu_s": time.process_time() - middle,
        "correct": correct(blocks, offsets, height),
    }


def read(path: Path) -> list[Block]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [Block((i,), int(row["size"]), int(row["lower"]), int(row["upper"])) for i, row in enumerate(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", type=Path, default=[], help="blocks, as id,lower,upper,size")
    parser.add_argument("--only", nargs="+", default=[], help="names of instances, such as fractions_140")
    args = parser.parse_args()
    work: dict[str, Callable[[], tuple[list[Block], int]]] = {}
    for path in args.files:
        work[path.name] = lambda path=path: (found := read(path), peak_bytes(found)[0])
    for cut in () if args.files else CUTS:
        for number, count in enumerate(COUNTS):
            work[f"{cut.__name__}_{count}"] = lambda cut=cut, count=count, number=number: (
                instance(cut, count, FIRST_SEED + number),
                HEIGHT * ALIGNMENT_BYTES,
            )
    rows: list[dict[str, Any]] = []
    for name, make in work.items():
        if not args.only or name in args.only:
            rows.append(attempt(lambda make=make: measured(*make()), name))
            show(rows[-1:], COLUMNS)
    summary = {
        key: {"median": statistics.median(values), "worst": max(values)}
        for key in ("heuristics", "height", "cpu_s")
        if (values := [row[key] for row in rows if key in row])
    }
    show(rows, COLUMNS)
    for key, found in summary.items():
        print(f"{key}: median {found['median']:.4g}, worst {found['worst']:.4g}")
    if not args.only:
        write("placements_files" if args.files else "placements", rows, summary=summary)


if __name__ == "__main__":
    start(main)
