"""Names of GPUs as people and nvidia-smi write them: `RTX 3060`, `rtx-3060`, `NVIDIA A100-SXM4-40GB`, `3060`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from mbc.errors import MbcError

_WORD = re.compile(r"[-_\s]+")
_GLUED = re.compile(r"(?<=rtx)(?=\d)|(?<=\d)(?=(?:ti|super)\b)")  # RTX3060, 2080Ti
_FILLERS = frozenset({"nvidia", "geforce", "tesla", "gpu"})
_MOST_SHOWN = 8


def choose_card(name: str, cards: Mapping[str, tuple[str, float]]) -> str:
    """Return the key of the card that `name` means.

    A name means a card if it is the card's key or name, whatever its case, hyphens and filler words. Else it means the
    only card that has all of its words. Of several such cards it means the one whose words all the others have, too.

    Args:
        name: The text that a user wrote.
        cards: Name by the driver and memory in GB of each card, by key.

    Raises:
        MbcError: MBC070, the name means no card, or one of several.
    """
    asked = _words(name)
    for names in ({key: key for key in cards}, {key: full for key, (full, _) in cards.items()}):
        equal = [key for key, one in names.items() if asked and _words(one) == asked]
        if len(equal) == 1:
            return equal[0]
    sets = {key: {*_words(key), *_words(full)} for key, (full, _) in cards.items()}
    near = [key for key, (_, gb) in cards.items() if asked and {*asked} <= {*sets[key], f"{gb:g}gb"}]
    if smallest := [key for key in near if all(sets[key] <= sets[one] for one in near)]:
        return smallest[0]
    if near:
        raise MbcError("MBC070", f"several GPUs are called '{name}'", f"choose one of {_listed(near)}")
    plain = "-".join(asked)
    near = difflib.get_close_matches(plain, [key for key in cards if _numbers_are_alike(plain, key)], 1, 0.75)
    meant = f"did you mean {_listed(near, ' or ')}? Else " if near else ""
    raise MbcError(
        "MBC070",
        f"unknown GPU '{name}'",
        f"{meant}choose one that `mbc gpus` lists (compute capability 7.5 and newer, and some older ones for plans "
        "only), or describe the card in a file: --gpu card.json",
    )


def _words(name: str) -> tuple[str, ...]:
    """Return the words of a name without words that name no card, "16 GB" as one word and "2080Ti" as two."""
    plain = _GLUED.sub(" ", re.sub(r"(\d) gb\b", r"\1gb", name.lower()))
    return tuple(word for word in _WORD.split(plain) if word and word not in _FILLERS)


def _numbers_are_alike(name: str, other: str) -> bool:
    """Return whether the numbers of two names, if both have some, begin alike: 3091 and 3090, but not 1080 and 5080."""
    first, second = (next(filter(str.isdigit, text), "") for text in (name, other))
    return first == second or not first or not second


def _listed(keys: list[str], last: str = ", ") -> str:
    more = f" and {len(keys) - _MOST_SHOWN} more (mbc gpus)" if len(keys) > _MOST_SHOWN else ""
    return last.join(keys[:_MOST_SHOWN]) + more
