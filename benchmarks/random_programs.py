"""Random programs of PyTorch through export, import and interpreter: outputs, loss and all gradients in fp64.

A program is a module of 4 to 40 random operations (`program_vocabulary.py`): views, writes in place through views and
to their bases, branches, regions without gradients, shared and tied layers, odd shapes, random arguments. It is
exported, saved and read like a user's file, and compared with PyTorch within 1e-9 relative (`exactness.py`). One
program in ten is also planned for a GPU within a random memory budget, and the plan is stepped on the CPU. Programs
whose gradients PyTorch itself cannot reproduce under a change of 1e-13 in weights and inputs are left out.

Acceptance is counted by operation: an ATen operation of a refused program counts as refused if the refusal names it,
otherwise as accepted. `whole` counts only operations of accepted programs. Both are shares of all drawn operations.
Needs torch, no GPU.

    python benchmarks/random_programs.py [--cases 30000] [--seed 0] [--workers 16] [--shard 1/4] [--resume]
    python benchmarks/random_programs.py --replay 123 [--cut]

`results/random_programs.json` has the chunks of programs until all are judged, then a row for each operation.
`--replay` prints a program and its verdict, `--cut` the fewest of its statements that still have the verdict.
"""

from __future__ import annotations

import argparse
import random
import signal
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from exactness import Reference, Verdict, judge, reference
from program_draft import Draft, Text
from program_vocabulary import draw_operation
from record import show, start, write
from sharded import Verdict as Counted
from sharded import campaign, options_of, parser_of, tell

NAME = "random_programs"
SHAPES = (
    (2, 3, 7, 5), (3, 1, 9, 11), (2, 5, 7, 5), (4, 3, 9, 11), (2, 4, 8, 6), (3, 3, 6, 6), (2, 6, 5, 7), (3, 5, 9),
    (2, 3, 11), (4, 7), (3, 12),
)  # fmt: skip
STABLE = 1e-10  # how far gradients may move by a change of NOISE
NOISE = 1e-13
MOST_ATTEMPTS = 40
PLANNED_EVERY = 10  # programs
LIMIT_S = 60.0  # for one program
CHUNK = 500  # programs of a row
# What is counted of a program begins with one of these words.
PROGRAMS, ACCEPTED, REFUSED, PLANNED, REASON = "with ", "accepted with ", "refused by ", "planned and ", "because "


def drawn(seed: int, index: int) -> tuple[Text, str, Reference]:
    """Return the program with the number `index`, its loss, and PyTorch's results."""
    for attempt in range(MOST_ATTEMPTS):
        try:
            text, loss = _draft(f"{seed}/{index}/{attempt}")
        except (RuntimeError, ValueError):  # its end cannot be written: numbers too large, views that cannot be read
            continue
        expected = settled(text, loss, index)
        if expected is not None:
            return expected[0], loss, expected[1]
    raise RuntimeError(f"no program was drawn in {MOST_ATTEMPTS} attempts")


def _draft(seed: str) -> tuple[Text, str]:
    d = Draft(seed, random.Random(seed).choice(SHAPES))
    rank = len(d.text.shape)
    stem = d.chance(0.9)
    if stem:
        channels, width = d.text.shape[1], d.one_of(3, 4, 5, 6)
        layer = (
            f"nn.Linear({channels}, {width})" if rank == 2 else f"nn.Conv{rank - 2}d({channels}, {width}, 3, padding=1)"
        )
        d.let(d.layer(layer) + "(x)")
    wanted = 3 + int(37 * d.random.random() ** 3)
    count = tries = 0
    while count < wanted and tries < 4 * wanted:
        count += draw_operation(d)
        tries += 1
    return d.text, _head(d)


def _head(d: Draft) -> str:
    """Write the end of the program: logits for a cross entropy, or any tensor for a mean squared error."""
    x = d.pick(2)
    rank = len(d.shape(x))
    if d.chance(0.35):
        d.text.result = d.let(d.layer(f"nn.Conv2d({d.shape(x)[1]}, 3, 1)") + f"({x})") if rank == 4 else x
        return "mse"
    if rank > 2:
        axes = tuple(range(2, rank))
        pooled = [f"{x}.mean({axes})", f"{x}.flatten(1)", f"{x}.amax({axes})", f"{x}.sum({axes})"]
        pooled += [f"F.adaptive_avg_pool2d({x}, 1).flatten(1)"] if rank == 4 else []
        x = d.let(d.one_of(*pooled))
    d.text.result = d.let(d.layer(f"nn.Linear({d.shape(x)[1]}, {d.one_of(2, 3, 5)})") + f"({x})")
    return "softmax_cross_entropy"


def settled(text: Text, loss: str, seed: int) -> tuple[Text, Reference] | None:
    """Return a program that PyTorch can train, and PyTorch's results, or None if there is no such program.

    A write in place may destroy a value that a gradient needs. Such writes are left out, the latest first.
    """
    while True:
        try:
            expected = reference(text.module(seed), [text.input(seed)], loss)
            break
        except Exception:
            writes = [n for n, statement in enumerate(text.body) if _writes(statement)]
            if not writes:
                return None
            body = text.body[: writes[-1]] + text.body[writes[-1] + 1 :]
            text = replace(text, body=body)
    moved = reference(text.module(seed), [text.input(seed)], loss, NOISE)
    return (text, expected) if _alike(expected, moved) else None


def _writes(statement: str) -> bool:
    return (
        "_(" in statement
        or "inplace=True" in statement
        or "] = " in statement
        or "+= " in statement
        or "*= " in statement
    )


def _alike(a: Reference, b: Reference) -> bool:
    pairs = [(x, y) for x, y in zip((*a.outputs, *a.evaluated), (*b.outputs, *b.evaluated), strict=True)]
    pairs += [(g, b.gradients[n]) for n, g in a.gradients.items() if g is not None]
    trained = [g for g in a.gradients.values() if g is not None]
    scale = max((float(np.linalg.norm(g)) for g in trained), default=0.0)
    if not 1e-6 < scale < 1e6 or not np.isfinite(a.loss):
        return False
    return all(bool(np.linalg.norm(x - y) <= STABLE * max(float(np.linalg.norm(x)), 1e-3 * scale)) for x, y in pairs)


# ---- one after the other ----


class TooLong(BaseException):
    """Raised when a program takes longer than it may."""


def stop(*_: object) -> None:
    """Raise `TooLong` from a signal's handler."""
    raise TooLong


def verdict(seed: int, index: int, limit_s: float, planned: bool) -> tuple[Verdict, Text | None]:
    """Draw and judge the program with the number `index`."""
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    text: Text | None = None
    try:
        text, loss, expected = drawn(seed, index)
        return judge(
            text.module(index), [text.input(index)], loss, expected, f"{seed}/{index}" if planned else ""
        ), text
    except TooLong:
        return Verdict("timeout"), text
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def judged_program(seed: int, number: int) -> Counted:
    """Judge one program, and count its operations."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    planned = number % PLANNED_EVERY == 0
    created, text = verdict(seed, number, LIMIT_S, planned)
    is_equal, kinds = created.kind == "equal", set(created.operations)
    counts = Counter({"operations": len(created.operations)})
    counts["refused operations"] = sum(target in created.refused for target in created.operations)
    counts["operations of accepted programs"] = is_equal * len(created.operations)
    counts.update(f"{PROGRAMS}{kind}" for kind in kinds)
    counts.update(f"{ACCEPTED}{kind}" for kind in kinds if is_equal)
    counts.update(f"{REFUSED}{kind}" for kind in kinds.intersection(created.refused))
    counts.update(f"{REASON}{reason}" for reason in reasons([] if is_equal else [created.detail]))
    counts.update([f"{PLANNED}{created.kind}"] if planned else [])
    failed = created.kind not in ("equal", "refused")
    return Counted(created.kind, f"{created.detail}\n{text.code() if text else ''}" if failed else "", counts)


def summarise(totals: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures of a campaign, and a row for each operation.

    A row has the programs with the operation, how many of them were accepted, and how many refusals name it.
    """
    verdicts, counts = Counter[str](totals["outcomes"]), Counter[str](totals["counts"])

    def counted(prefix: str) -> Counter[str]:
        return Counter({name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)})

    accepted, refused, count = counted(ACCEPTED), counted(REFUSED), max(verdicts.total(), 1)
    table = [
        {"name": name, "programs": programs, "accepted": accepted[name], "refused": refused[name]}
        for name, programs in counted(PROGRAMS).most_common()
    ]
    figures = {
        "programs": verdicts.total(),
        "verdicts": dict(verdicts.most_common()),
        "operations": counts["operations"],
        "kinds": len(table),
        "accepted_programs": round(verdicts["equal"] / count, 4),
        "accepted_operations": round(1 - counts["refused operations"] / max(counts["operations"], 1), 4),
        "accepted_whole": round(counts["operations of accepted programs"] / max(counts["operations"], 1), 4),
        "planned": dict(counted(PLANNED).most_common()),
        "reasons": dict(counted(REASON).most_common(60)),
    }
    return figures, table


def reasons(details: Iterable[str]) -> Counter[str]:
    """Return how many of these refusals name each refused operation with its reason."""
    result: Counter[str] = Counter()
    for detail in details:
        lines = {line.strip() for line in detail.splitlines() if line.startswith("  ") and ": " in line}
        result.update({line.partition(": ")[2] for line in lines if not line.startswith(("at ", "instead"))})
    return result


def cut(text: Text, loss: str, seed: int, kind: str) -> Text:
    """Return the program with the fewest statements that still has the verdict."""
    n = len(text.body) - 1
    while n >= 0:
        tried = replace(text, body=text.body[:n] + text.body[n + 1 :])
        try:
            expected = reference(tried.module(seed), [tried.input(seed)], loss)
            if judge(tried.module(seed), [tried.input(seed)], loss, expected).kind == kind:
                text = tried
        except Exception:  # the statement is needed
            pass
        n -= 1
    code = "\n".join(text.body)
    return replace(text, held=[line for line in text.held if _name_of(line) in code])


def _name_of(line: str) -> str:
    if "register_buffer" in line:
        return line.split("'")[1]
    return "self." if "].weight" in line else line.split(" = ")[0].partition(".weight")[0]


def replay(options: argparse.Namespace) -> None:
    """Print the program with the number `index` and its verdict."""
    text, loss, expected = drawn(options.seed, options.replay)
    seed = options.replay
    outcome = judge(
        text.module(seed), [text.input(seed)], loss, expected, f"{options.seed}/{seed}" if options.planned else ""
    )
    if options.cut:
        text = cut(text, loss, seed, outcome.kind)
        outcome = judge(text.module(seed), [text.input(seed)], loss)
    print(
        f"{text.code()}\nmodel, x, loss = Drawn(), torch.randn{text.shape}, '{loss}'\n{outcome.kind}: {outcome.detail}"
    )


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__, 30_000)
    parser.add_argument("--replay", type=int, help="print the program of this index")
    parser.add_argument("--cut", action="store_true", help="with --replay: the least of it")
    parser.add_argument("--planned", action="store_true", help="with --replay: plan it, too")
    given = parser.parse_args()
    if given.replay is not None:
        torch.set_num_threads(1)
        replay(given)
        return
    totals = campaign(NAME, judged_program, options_of(given), CHUNK)
    figures, table = summarise(totals)
    if totals["finished"] and (given.shard == (0, 1) or given.merge):
        write(NAME, table, seed=given.seed, **figures, wrong=totals["failures"], cpu_seconds=totals["cpu_seconds"])
        show(table, ("name", "programs", "accepted", "refused"))
    tell({**totals, "counts": {key: figures[key] for key in ("programs", "operations", "kinds")}})


if __name__ == "__main__":
    start(main)
