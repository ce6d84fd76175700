"""Parts of a GPU: some of its multiprocessors, as in CUDA's green contexts.

Planning treats a part as a separate GPU. Its name has its number of multiprocessors (`h100@72`, `NVIDIA H200@72`), and
by that name profiles, estimates and plans of the part differ from those of the whole. Memory and copies are those of
the whole GPU.
"""

from __future__ import annotations

from mbc.errors import MbcError

_SIGN = "@"
_MOST_DIGITS = 4
# CUDA Driver API, "Green Contexts": the least number of multiprocessors of a part, and the number of which it must be a
# multiple, by the major compute capability; from 9 on the last entry.
_LEAST = {7: 2, 8: 4, 9: 8}
_MULTIPLE = {7: 2, 8: 2, 9: 8}


def split_name(name: str) -> tuple[str, int | None]:
    """Return the name of the whole GPU and the number of multiprocessors in `name`, None for all of them.

    Raises:
        MbcError: MBC286, the text after `@` is not a number.
    """
    whole, sign, count = name.partition(_SIGN)
    if not sign:
        return name, None
    if not (count.isascii() and count.isdecimal() and len(count) <= _MOST_DIGITS) or not whole:
        raise MbcError(
            "MBC286", f"'{name}' is not a part of a GPU", "write a number of multiprocessors after @, as in h100@72"
        )
    return whole, int(count)


def whole_name(name: str) -> str:
    """Return the driver's name of the GPU that `name` is, or is a part of."""
    return name.partition(_SIGN)[0]


def part_name(whole: str, multiprocessors: int) -> str:
    """Return the name of a part of the GPU `whole`."""
    return f"{whole}{_SIGN}{multiprocessors}"


def check_part(whole: str, architecture: str, most: int, multiprocessors: int) -> None:
    """Raise MBC286 if the driver cannot create a part of `multiprocessors` of the `most` multiprocessors."""
    major, newest = int(architecture.removeprefix("sm_").rstrip("af")) // 10, max(_LEAST)
    least, multiple = (of.get(major, of[newest] if major > newest else 1) for of in (_LEAST, _MULTIPLE))
    if least <= multiprocessors < most and multiprocessors % multiple == 0:
        return
    below = max(least, min(multiprocessors, most - 1) // multiple * multiple)
    near = [str(count) for count in (below, below + multiple) if count < most]
    raise MbcError(
        "MBC286",
        f"{whole} cannot be divided into a part of {multiprocessors} multiprocessors: a part has a multiple of "
        f"{multiple}, at least {least} and fewer than {most}",
        f"choose {' or '.join(near)}",
    )
