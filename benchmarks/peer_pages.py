"""A table of the results of `mbc bench` (`results/bench_*.json`), for `pictures.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PEERS = ("torch", "torch.compile", "jax")
GIB = 1 << 30


def peer_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """No pictures, and the part of the page."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("bench_*.json"))]
    if not found:
        return {}, []
    head = ["network", "GPU", "batch", "precision", "mbc, ms", "memory, GiB", "predicted", "over the floor"]
    head += [text for peer in PEERS for text in (f"{peer}'s best, ms", "over mbc")]
    lines = [head, ["---"] * len(head), *map(_line, found)]
    machines = ", ".join(sorted({f"{d['device']} (driver {d['driver']})" for d in found}))
    dates = [d["date"][:10] for d in found]
    where = f"{machines}, {min(dates)} to {max(dates)}"
    return {}, [
        "## Beside PyTorch and JAX", "",
        f"{where}: `mbc bench`, every peer's settings in the same run as mbc. Memory is that of tensors. A "
        "peer without a figure was not asked, or took longer than it was given; each file says which.", "",
        *("| " + " | ".join(line) + " |" for line in lines), "",
    ]  # fmt: skip


def _line(found: Mapping[str, Any]) -> list[str]:
    ours_ms = found["mbc"]["step_ms"]
    line = [_network(found), found["device"].split()[1], str(found["batch"]), found["precision"], f"{ours_ms:.2f}",
            f"{found['mbc']['peak_bytes'] / GIB:.2f}", f"{found['predicted_ms'] / ours_ms:.3f}x",
            f"{found['over_floor']:.2f}x"]  # fmt: skip
    for peer in PEERS:
        timed = [c for c in found["contenders"] if c["peer"] == peer and not c["problem"] and c["same"]]
        if not timed:
            line += ["-", "-"]
            continue
        best = min(timed, key=lambda c: c["step_ms"])
        mode = "" if best["mode"] in ("", "default") else f" ({best['mode']})"
        line += [f"{best['step_ms']:.2f}{mode}", f"{best['step_ms'] / ours_ms:.2f}x"]
    return line


def _network(found: Mapping[str, Any]) -> str:
    """With what tells networks of one source apart; batch and precision have columns of their own."""
    said = [
        value if name.startswith("memory.") else f"{name} {value}"
        for name, value in found["settings"].items()
        if name not in ("batch", "train.precision")
    ]
    return ", ".join([found["network"], *said])
