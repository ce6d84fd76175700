"""Campaigns of numbered cases: by several processes, in shards on several machines, interrupted and continued.

A campaign judges each case by its number alone, so any part of the campaign can run anywhere. Chunks of cases are rows
of `results/<name>.json` (of a shard `results/<name>_<i>_of_<n>.json`), which are written when they end. `--resume`
keeps the rows that today's code computed. `--merge n` makes one file of n shards.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any, NamedTuple

from campaign import side_by_side
from record import RESULTS, Results, results, write

CHUNK = 20  # cases of a row, where a case takes less than a second
CASE_SECONDS = 600  # a case that takes longer has failed


class Verdict(NamedTuple):
    """The verdict on a case. `counts`: figures to add up over all cases. `failure`: its reason, or empty."""

    outcome: str
    failure: str = ""
    counts: Mapping[str, int] = {}


Judge = Callable[[int, int], Verdict]  # of a seed and a number; a function of a module, which processes find by name


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    cases: int
    seed: int
    workers: int
    shard: tuple[int, int]
    seconds: float
    resume: bool
    merge: int


def asked(description: str | None, cases: int, seed: int = 0) -> Asked:
    """Read the command line."""
    return options_of(parser_of(description, cases, seed).parse_args())


def options_of(given: argparse.Namespace) -> Asked:
    """Return the options of a campaign that a parser of `parser_of` has read."""
    return Asked(**{field.name: getattr(given, field.name) for field in fields(Asked)})


def parser_of(description: str | None, cases: int, seed: int = 0) -> argparse.ArgumentParser:
    """Return a parser with the options of a campaign."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--workers", type=int, default=1, help="processes, one core each")
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), metavar="I/N", help="every N-th chunk, from the I-th on"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no chunk later than that")
    parser.add_argument("--resume", action="store_true", help="keep the chunks that today's code made before")
    parser.add_argument("--merge", type=int, default=0, metavar="N", help="make one file of the files of N shards")
    return parser


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"'{text}' is no shard such as 0/4")
    return int(number), int(count)


def campaign(name: str, judge: Judge, options: Asked, chunk: int = CHUNK) -> dict[str, Any]:
    """Judge all selected cases, write the rows of their chunks, and return the totals."""
    if options.merge:
        return _merged(name, options.merge, chunk)
    number, count = options.shard
    file = name if count == 1 else f"{name}_{number}_of_{count}"
    about = {"seed": options.seed, "cases": options.cases, "shard": f"{number}/{count}"}
    kept = results(file, current=True, **about) if options.resume else Results(file, about, {})
    mine = _chunks(options.cases, chunk)[number::count]
    chunks = [c for c in mine if not kept.done(_title(c))]
    started = time.monotonic()
    for row in _judged(judge, options, chunks, started):
        kept.put(row)
        print(f"{row['name']}: {row['outcomes']}{'; FAILED' if row['failures'] else ''}", flush=True)
    kept.arrange([_title(c) for c in mine])
    return _written(file, list(kept.rows.values()), about, len(mine))


def judged(judge: Judge, seed: int, numbers: Sequence[int]) -> dict[str, Any]:
    """Judge cases in this process, and return their row."""
    outcomes, counts, failures = Counter[str](), Counter[str](), list[dict[str, Any]]()
    began = time.process_time()
    for number in numbers:
        try:
            with _limited():
                verdict = judge(seed, number)
        except Exception as error:  # nothing that a case raises may end the campaign
            verdict = Verdict("error", f"{type(error).__name__}: {error}"[:1000])
        outcomes[verdict.outcome] += 1
        counts.update(verdict.counts)
        if verdict.failure:
            failures.append({"number": number, "outcome": verdict.outcome, "why": verdict.failure})
    seconds = round(time.process_time() - began, 1)
    row = {"outcomes": dict(outcomes), "counts": dict(counts), "failures": failures, "seconds": seconds}
    return {"name": _title(range(numbers[0], numbers[-1] + 1)), **row}


class _limited:
    """Raise TimeoutError in the body if it takes too long."""

    def __enter__(self) -> None:
        def late(number: int, frame: FrameType | None) -> None:
            raise TimeoutError(f"took more than {CASE_SECONDS} s")

        self._before = signal.signal(signal.SIGALRM, late)
        signal.alarm(CASE_SECONDS)

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self._before)


def _chunks(cases: int, size: int) -> list[range]:
    return [range(first, min(first + size, cases)) for first in range(0, cases, size)]


def _title(chunk: range) -> str:
    return f"{chunk.start}-{chunk.stop - 1}"


def _judged(judge: Judge, options: Asked, chunks: Sequence[range], started: float) -> Iterator[dict[str, Any]]:
    """Yield the rows as they are finished."""
    if options.workers == 1:
        for chunk in chunks:
            if time.monotonic() - started < options.seconds:
                yield judged(judge, options.seed, chunk)
        return
    calls = ((judged, (judge, options.seed, chunk)) for chunk in chunks)
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        yield from side_by_side(pool, options.workers, lambda: next(calls, None), started + options.seconds)


def _written(file: str, rows: list[dict[str, Any]], about: dict[str, Any], chunks: int) -> dict[str, Any]:
    totals = {
        "outcomes": dict(sum((Counter(row["outcomes"]) for row in rows), Counter[str]())),
        "counts": dict(sum((Counter(row["counts"]) for row in rows), Counter[str]())),
        "failures": [failure for row in rows for failure in row["failures"]],
        "cpu_seconds": round(sum(row["seconds"] for row in rows)),
        "finished": len(rows) == chunks,
    }
    write(file, rows, **about, **totals)
    return totals


def _merged(name: str, shards: int, chunk: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    held: list[dict[str, Any]] = []
    for number in range(shards):
        path = RESULTS / f"{name}_{number}_of_{shards}.json"
        held.append(json.loads(path.read_text(encoding="utf-8")))
        rows += held[-1]["rows"]
    same = ("seed", "cases", "code")
    if any(one[key] != held[0][key] for one in held for key in same):
        raise SystemExit(f"the shards of {name} are not of one campaign")
    rows.sort(key=lambda row: int(row["name"].partition("-")[0]))
    about = {"seed": held[0]["seed"], "cases": held[0]["cases"], "shards": shards}
    totals = _written(name, rows, about, len(_chunks(held[0]["cases"], chunk)))
    for number in range(shards):
        (RESULTS / f"{name}_{number}_of_{shards}.json").unlink()
    return totals


def tell(totals: Mapping[str, Any]) -> None:
    """Print the totals. Raise SystemExit if a case failed."""
    for key in ("outcomes", "counts"):
        print(", ".join(f"{number:,} {what}" for what, number in sorted(totals[key].items())))
    if not totals["finished"]:
        print("cut off: --resume goes on")
    if totals["failures"]:
        raise SystemExit(f"{len(totals['failures'])} cases failed; the first: {totals['failures'][0]}")
