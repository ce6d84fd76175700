"""Parts of a GPU, as in CUDA's green contexts, and architectures as which a GPU poses.

A part is some of a GPU's multiprocessors (`h100@72`). A GPU that poses runs code for another architecture within that
architecture's limits (`h100@sm_80`). Planning treats both as separate GPUs, by whose names (`NVIDIA H200@72@sm_80`)
profiles, estimates and plans differ from those of the whole GPU. Memory and copies are those of the whole GPU.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mbc.errors import MbcError
from mbc.hardware.datasheet import BUILDABLE

_SIGN = "@"
# Poses as people write them: h200@sm86, h200@SM-86, h200@compute_86, h200@8.6.
_MISSPELT = re.compile(rf"([^{_SIGN}]+{_SIGN}(?:\d+{_SIGN})?)(?:sm|compute)?[-_ ]?(\d{{1,2}})\.?(\d)", re.A | re.I)
_SUFFIXES = re.compile(rf"(?:{_SIGN}(\d{{1,4}}))?(?:{_SIGN}(sm_\d{{2,3}}))?", re.ASCII)
# CUDA Driver API, "Green Contexts": the least number of multiprocessors of a part, and the number of which it must be a
# multiple, by the major compute capability; from 9 on the last entry.
_LEAST = {7: 2, 8: 4, 9: 8}
_MULTIPLE = {7: 2, 8: 2, 9: 8}


class GpuName(NamedTuple):
    """Name of a GPU in its parts.

    Attributes:
        whole: Name of the whole GPU.
        multiprocessors: Number of multiprocessors that are used; None for all of them.
        pose: Architecture as which the GPU poses; empty for its own.
    """

    whole: str
    multiprocessors: int | None = None
    pose: str = ""

    def __str__(self) -> str:
        """Return the name as a user writes it."""
        count = "" if self.multiprocessors is None else f"{_SIGN}{self.multiprocessors}"
        return f"{self.whole}{count}{_SIGN * bool(self.pose)}{self.pose}"


def split_name(name: str) -> GpuName:
    """Return the parts of a name.

    Raises:
        MbcError: MBC286, the text after `@` is neither a number nor an architecture.
    """
    whole = whole_name(name)
    match = _SUFFIXES.fullmatch(name, len(whole))
    if match is None or (name and not whole):
        raise MbcError(
            "MBC286",
            f"'{name}' is not a part of a GPU",
            f"{_meant(name)}write a number of multiprocessors after @, as in h100@72, or an architecture to pose as, "
            "as in h100@sm_80",
        )
    return GpuName(whole, None if match[1] is None else int(match[1]), match[2] or "")


def _meant(name: str) -> str:
    """Return a question after the architecture that a misspelt pose means (`h200@sm86`); empty if it means none."""
    match = _MISSPELT.fullmatch(name)
    if match is None or (pose := f"sm_{match[2]}{match[3]}") not in BUILDABLE:
        return ""
    return f"did you mean {match[1]}{pose}? Else "


def whole_name(name: str) -> str:
    """Return the driver's name of the GPU that `name` is, or is a part of."""
    return name.partition(_SIGN)[0]


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
