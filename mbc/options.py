"""Everything a compilation can be told, beside its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """`settings` are `--set NAME=VALUE` in order; they override the network's parameters and its sections.

    `workspace_limit_bytes` bounds the workspace of one operation; `micro_batch` divides convolutions into kernel calls
    of so many rows (0: undivided).
    """

    gpu: str = "auto"  # short name of a device spec; auto: the GPU of this machine, else h200
    settings: tuple[tuple[str, str], ...] = ()
    network: str | None = None  # which network of a source that has several
    workspace_limit_bytes: int = 512 << 20
    micro_batch: int = 0
    dump_stages: str | None = None
    profile: str | None = None  # path of a SQLite profile
