"""Parts of a GPU: some of its multiprocessors, as CUDA's green contexts have them.

To planning a part is a GPU of its own: its name says how many multiprocessors it has (`h100@72`, `NVIDIA H200@72`), and
profiles, estimates and plans of the part are told by that name from those of the whole. Memory and copies are those of
the whole GPU.
"""

from __future__ import annotations

from mbc.errors import MbcError

_SIGN = "@"
_MOST_DIGITS = 4
# CUDA Driver API, "Green Contexts": parts of this many multiprocessors at least, and multiples of it, by the major
# compute capability; from 9 on the last entry.
_LEAST = {7: 2, 8: 4, 9: 8}
_MULTIPLE = {7: 2, 8: 2, 9: 8}


def split_name(name: str) -> tuple[str, int | None]:
    """The name of the whole GPU, and how many multiprocessors `name` is of; None: all of them. MBC286 for no number."""
    whole, sign, count = name.partition(_SIGN)
    if not sign:
        return name, None
    if not (count.isascii() and count.isdecimal() and len(count) <= _MOST_DIGITS) or not whole:
        raise MbcError(
            "MBC286", f"'{name}' names no part of a GPU", "write its multiprocessors behind its name, as h100@72"
        )
    return whole, int(count)


def whole_name(name: str) -> str:
    """What the driver calls the GPU that `name` is, or is a part of."""
    return name.partition(_SIGN)[0]


def part_name(whole: str, multiprocessors: int) -> str:
    return f"{whole}{_SIGN}{multiprocessors}"


def check_part(whole: str, architecture: str, most: int, multiprocessors: int) -> None:
    """MBC286 where the driver makes no part of so many of the `most` multiprocessors."""
    major, newest = int(architecture.removeprefix("sm_").rstrip("af")) // 10, max(_LEAST)
    least, multiple = (of.get(major, of[newest] if major > newest else 1) for of in (_LEAST, _MULTIPLE))
    if least <= multiprocessors < most and multiprocessors % multiple == 0:
        return
    below = max(least, min(multiprocessors, most - 1) // multiple * multiple)
    near = [str(count) for count in (below, below + multiple) if count < most]
    raise MbcError(
        "MBC286",
        f"{whole} has no part of {multiprocessors} multiprocessors: parts have multiples of {multiple}, from {least} on"
        f" and fewer than {most}",
        f"choose {' or '.join(near)}",
    )
