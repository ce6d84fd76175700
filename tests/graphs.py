"""Sources of small networks and the training graph of a source, with which many tests begin."""

from __future__ import annotations

from pathlib import Path

from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.ir.graph import Operation, Ranks, TrainingGraph
from mbc.passes.training_step import differentiate
from mbc.source import Source


def network_source(name: str) -> str:
    """Return the source of a network in tests/cases/networks."""
    return (Path(__file__).parent / "cases" / "networks" / f"{name}.mbc").read_text(encoding="utf-8")


def training_graph(
    text: str, *settings: tuple[str, str], ranks: Ranks | None = None, shard: bool = False
) -> TrainingGraph:
    """Return one training step of the network in a source.

    Args:
        text: The source.
        settings: Names and values, as for `--set`.
        ranks: Ranks that share the mini-batch; None for one GPU.
        shard: Whether the optimizer's states are sharded over ranks.
    """
    lowered = lower(parse(Source("net.mbc", text)), settings)
    return differentiate(lowered.network, lowered.optimizer, lowered.precision, ranks, shard)


def of_kind(graph: TrainingGraph, kind: str) -> list[Operation]:
    """Return the operations of a training step that have this kind."""
    return [op for op in graph.train if op.kind == kind]
