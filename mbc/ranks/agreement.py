"""Checks of facts in which ranks must agree, and of facts in which they must differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mbc.errors import MbcError


def check_same(facts: Sequence[Mapping[str, str]]) -> None:
    """Raise an error unless all ranks have equal facts.

    Args:
        facts: The facts of each rank by name, in the order of ranks.

    Raises:
        MbcError: MBC263 with every fact that differs, its values and their ranks.
    """
    differing = [
        f"{name}: " + "; ".join(f"{value or 'nothing'} on {_named(ranks)}" for value, ranks in values.items())
        for name in dict.fromkeys(name for one in facts for name in one)
        if len(values := _by_value(one.get(name, "") for one in facts)) > 1
    ]
    if differing:
        raise MbcError(
            "MBC263", f"the ranks differ in {'; in '.join(differing)}",
            "give all ranks the same mbc, source or package, options, seed, driver and cuDNN",
        )  # fmt: skip


def check_distinct(what: str, values: Sequence[str]) -> None:
    """Raise an error if two ranks have equal values, such as the same GPU.

    Raises:
        MbcError: MBC266 with the ranks and their value.
    """
    for same, ranks in _by_value(values).items():
        if len(ranks) > 1:
            raise MbcError(
                "MBC266", f"{_named(ranks)} have the same {what}, {same}",
                "start as many ranks as there are GPUs, and check CUDA_VISIBLE_DEVICES",
            )  # fmt: skip


def _by_value(values: Iterable[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
