"""A table of the results of `mbc bench` (`results/bench_*.json`), for `pictures.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PEERS = ("torch", "torch.compile", "jax")
GIB = 1 << 30


def peer_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return no pictures, and the part of the page."""
    run = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("bench_*.json"))]
    if not run:
        return {}, []
    head = ["network", "GPU", "batch", "precision", "mbc, ms", "memory, GiB", "predicted", "over the floor"]
    head += [text for peer in PEERS for text in (f"{peer}'s best, ms", "over mbc")]
    lines = [head, ["---"] * len(head), *map(_line, run)]
    machines = ", ".join(sorted({f"{d['device']} (driver {d['driver']})" for d in run}))
    dates = [d["date"][:10] for d in run]
    where = f"{machines}, {min(dates)} to {max(dates)}"
    return {}, [
        "## Beside PyTorch and JAX", "",
        f"{where}: `mbc bench`, every peer's settings in the same run as mbc. Memory is that of tensors. A "
        "peer without a figure was not asked, or took longer than it was given; each file says which.", "",
        *("| " + " | ".join(line) + " |" for line in lines), "",
    ]  # fmt: skip


def _line(run: Mapping[str, Any]) -> list[str]:
    ours_ms = run["mbc"]["step_ms"]
    line = [network_name(run), run["device"].split()[1], str(run["batch"]), run["precision"], f"{ours_ms:.2f}",
            f"{run['mbc']['peak_bytes'] / GIB:.2f}", f"{run['predicted_ms'] / ours_ms:.3f}x",
            f"{run['over_floor']:.2f}x"]  # fmt: skip
    for peer in PEERS:
        best = best_of_peers(run, (peer,))
        if best is None:
            line += ["-", "-"]
            continue
        mode = "" if best["mode"] in ("", "default") else f" ({best['mode']})"
        line += [f"{best['step_ms']:.2f}{mode}", f"{best['step_ms'] / ours_ms:.2f}x"]
    return line


def best_of_peers(run: Mapping[str, Any], peers: Sequence[str] = PEERS) -> Mapping[str, Any] | None:
    """Return the fastest contender of these peers that computed the same as mbc, or None if none did."""
    timed = [c for c in run["contenders"] if c["peer"] in peers and not c["problem"] and c["same"]]
    return min(timed, key=lambda c: c["step_ms"], default=None)


def network_name(run: Mapping[str, Any]) -> str:
    """Return a network's name with the settings that distinguish networks of one source, but batch and precision."""
    said = [
        value if name.startswith("memory.") else f"{name} {value}"
        for name, value in run["settings"].items()
        if name not in ("batch", "train.precision")
    ]
    return ", ".join([run["network"], *said])
