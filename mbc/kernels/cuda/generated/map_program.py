"""The canonical program of a generated kernel: equal programs are one kernel, of one name and one source.

A program has no sizes and no values of attributes, which are arguments of a launch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

DIGITS = 12  # of the digest that names a program


@dataclass(frozen=True, slots=True)
class Line:
    """A value inside of a kernel, whose text is an expression in C."""

    name: str
    text: str


@dataclass(frozen=True)
class MapProgram:
    """Results as expressions over one element of each operand.

    The operands are `x[0]`, `x[1]`, ... in the lines: first those of the results' shape, then the repeated ones.
    Constants of a channel are computed from `c<number of the input>`. `r<number>` are floating-point arguments.

    Attributes:
        element: C++ type of operands and results.
        inputs: Number of inputs.
        whole: Numbers of the inputs of the results' shape.
        repeated: Numbers of the inputs that are repeated along axes of the results.
        vectors: Numbers and C++ types of the inputs with one element for each channel.
        reals: Number of floating-point arguments.
        channel_lines: Values that are computed once for each channel.
        kept: Values of channels that the elements need.
        lines: Values of one element.
        results: The values that are stored.
        stored: Numbers of the outputs in which the results are stored.
        sums: Values that are summed over each channel, at most two.
        finishes: Numbers of outputs with one element for each channel, with their values in terms of `sums[0]`, ...
        by_sample: Those of the vectors that have one element for each channel of each sample. If there are any, sums
            are those of a channel of one sample, too.
        final_lines: Values that follow from sums.
        small: Numbers of the outputs that have the shape of the sums, with the names of their values. If there are any,
            the constants of a channel have that shape, too.
    """

    element: str
    inputs: int
    whole: tuple[int, ...]
    repeated: tuple[int, ...]
    vectors: tuple[tuple[int, str], ...]
    reals: int
    channel_lines: tuple[Line, ...]
    kept: tuple[str, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    stored: tuple[int, ...]
    sums: tuple[str, ...] = ()
    finishes: tuple[tuple[int, str], ...] = ()
    by_sample: tuple[int, ...] = field(default=(), repr=False)
    final_lines: tuple[Line, ...] = field(default=(), repr=False)
    small: tuple[tuple[int, str], ...] = field(default=(), repr=False)

    @property
    def of_samples(self) -> bool:
        """True if sums are those of a channel of one sample."""
        return bool(self.by_sample or self.small)

    @cached_property
    def name(self) -> str:
        """Name of the kernel in plans, which follows from the program."""
        text = f"{self!r}{self.by_sample or ''}{(self.final_lines, self.small) if self.small else ''}"
        return f"map_{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"

    @property
    def symbol(self) -> str:
        """C function that launches the kernel."""
        return f"mbc_{self.name}"

    @property
    def file(self) -> str:
        """Name of the generated source."""
        return f"{self.name}.cu"
