"""A table of the results of `mbc bench` (`results/bench_*.json`), for `pictures.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables import Columns, document, entry, table, table_of

PEERS = {"torch": "PyTorch", "torch.compile": "torch.compile", "jax": "JAX"}
GIB = 1 << 30
HEAD = (
    "network", "GPU", "batch", "precision", "mbc, ms", "memory, GiB", "predicted over measured", "over the floor",
    "others, ms", "mbc over the fastest", "date",
)  # fmt: skip


def peer_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return no pictures and this section of the page, in which runs with the largest gain come first."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in results.glob("bench_*.json")]
    if not runs:
        return {}, []
    runs.sort(key=lambda run: (-gain(run), run["date"]))
    return {}, [
        "## Beside PyTorch and JAX", "",
        "Times of a training step. `mbc bench` times mbc and each framework in its fastest setting in one run. mbc "
        "emulates fp32 on tensor cores ([docs/emulated-fp32.md](../docs/emulated-fp32.md)); the others do not. Memory "
        "is that of tensors. \"Over the floor\" is mbc's step over the floor of "
        "[docs/roofline.md](../docs/roofline.md). "
        "A framework that a row does not name was left out of the run, or exceeded its limit of time; the results file "
        "says which.", "",
        *table(HEAD, map(_line, runs)), *_from_torch(results),
    ]  # fmt: skip


def _from_torch(results: Path) -> list[str]:
    """Return the table of networks that train by `mbc.from_torch`."""
    file = document(results, "from_torch_cuda")
    if file is None:
        return []
    return [
        "### Networks that mbc was never tuned for", "",
        "In bf16: `from_torch.py`. A time that is missing exceeded its limit of time or failed. Memory is "
        "what mbc takes of the GPU over what PyTorch reserved. The error is the largest relative difference of the "
        "first five losses from PyTorch's loop; networks that draw random numbers have none.", "",
        *table_of(FROM_TORCH, file["rows"]),
    ]  # fmt: skip


FROM_TORCH: Columns = {
    "network": entry("name"),
    "GPU": lambda row: row["gpu"].split()[1],
    "batch": entry("batch", "d"),
    "PyTorch, ms": entry("eager_ms", ".1f"),
    "torch.compile, ms": entry("compile_ms", ".1f"),
    "with CUDA graphs, ms": entry("cuda_graph_ms", ".1f"),
    "mbc, ms": entry("mbc_ms", ".1f"),
    "mbc over the fastest": entry("speedup", ".2f"),
    "memory": entry("memory_ratio", ".2f"),
    "error of losses": entry("loss_error", ".1e"),
    "of torch.compile's": entry("torch_loss_error", ".1e"),
}


def _line(run: Mapping[str, Any]) -> list[str]:
    ours_ms = run["mbc"]["step_ms"]
    others = [best for peer in PEERS if (best := best_of_peers(run, peer)) is not None]
    others.sort(key=lambda contender: contender["step_ms"])
    return [
        network_name(run), run["device"].split()[1], str(run["batch"]), run["precision"], three_digits(ours_ms),
        three_digits(run["mbc"]["peak_bytes"] / GIB), f"{run['predicted_ms'] / ours_ms:.2f}",
        f"{run['over_floor']:.2f}",
        ", ".join(f"{setting_name(other)} {three_digits(other['step_ms'])}" for other in others) or "-",
        f"{gain(run):.2f}", run["date"][:10],
    ]  # fmt: skip


def best_of_peers(run: Mapping[str, Any], peer: str = "") -> Mapping[str, Any] | None:
    """Return the fastest contender (of one peer, or of all) with mbc's losses, or None if there is none."""
    peers = (peer,) if peer else PEERS
    timed = [c for c in run["contenders"] if c["peer"] in peers and not c["problem"] and c["same"]]
    return min(timed, key=lambda c: c["step_ms"], default=None)


def gain(run: Mapping[str, Any]) -> float:
    """Return how many times as fast as the fastest other contender mbc is, or 0 if there is no other."""
    best = best_of_peers(run)
    return best["step_ms"] / run["mbc"]["step_ms"] if best else 0.0


def network_name(run: Mapping[str, Any]) -> str:
    """Return a network's name with its settings, except for batch and precision, which tables show in other columns."""
    said = [
        value if name.startswith("memory.") else f"{name} {value}"
        for name, value in run["settings"].items()
        if name not in ("batch", "train.precision")
    ]
    return ", ".join([run["network"], *said])


def setting_name(contender: Mapping[str, Any]) -> str:
    """Return a contender's name with the setting that it ran in."""
    mode = "" if contender["mode"] in ("", "default") else contender["mode"]
    said = [text for text in (mode, "CUDA graph" if contender["graph"] else "") if text]
    peer = PEERS[contender["peer"]]
    return f"{peer} ({', '.join(said)})" if said else peer


def three_digits(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:#.3g}".rstrip(".")
