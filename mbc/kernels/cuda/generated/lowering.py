"""Lowering: from a pointwise operation, or a group of them, to the program of a generated kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from mbc.ir.graph import Operation
from mbc.ir.types import DType, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.generated.map_program import Line, MapProgram
from mbc.kernels.cuda.generated.placement import (
    LAYOUTS,
    Place,
    is_vector,
    is_whole,
    operand_place,
    summed_image,
    whole_place,
)
from mbc.kernels.cuda.wiring import members_of
from mbc.ops import KINDS
from mbc.ops.device import Expression
from mbc.ops.fused import Fused, Member

MOST_OPERANDS, MOST_RESULTS = 8, 4  # each takes registers of every thread
MOST_SUMS = 2
_TYPES = {DType.FP32, DType.BF16, DType.FP16}
_NAME = re.compile(r"[A-Za-z_]\w*")
_OBJECT = re.compile(r"[A-Z]\w*\(")  # a constructor: its value is no number


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program with the arguments of a request.

    Attributes:
        program: The program.
        result: Type of the results.
        places: Places of the inputs along the axes of the results.
        reals: Floating-point arguments.
        small: Type of sums from which the group may compute further values; None if there are none.
    """

    program: MapProgram
    result: TensorType
    places: tuple[Place, ...]
    reals: tuple[float, ...]
    small: TensorType | None = None


@lru_cache(maxsize=4096)
def lower(request: Request) -> Lowered | None:
    """Return the program of a request; None if no kernel can be generated for it."""
    members = members_of(request)
    if any(KINDS[member.kind].device is None for member in members):
        return None
    given = request.attributes.given if isinstance(request.attributes, Fused) else members[0].outputs
    if not (0 < len(request.inputs) <= MOST_OPERANDS and len(given) <= MOST_RESULTS):
        return None
    if {t.dtype for t in request.inputs} - _TYPES:
        return None
    types = list(request.inputs)
    for member in members:
        types += KINDS[member.kind].shape(member.attributes, tuple(types[n] for n in member.inputs))
    values = _Values(members, given, types)
    places = values.places()
    return None if places is None else _lowered(request, values, places)


@dataclass(frozen=True)
class _Values:
    """The values of a group by number, and their types."""

    members: Sequence[Member]
    given: Sequence[int]
    types: Sequence[TensorType]

    @cached_property
    def sums(self) -> frozenset[int]:
        """Outputs of reductions."""
        return frozenset(n for m in self.members if expression_of(m).sums for n in m.outputs)

    @cached_property
    def small(self) -> TensorType | None:
        """Type of sums from which the group may compute further values; None if there are none."""
        inside = (n for m in self.members if expression_of(m).inside for n in m.outputs)
        return next((self.types[n] for n in inside), None)

    def is_summed(self, number: int) -> bool:
        """Return whether a value is the output of a reduction, or has its shape."""
        return number in self.sums or self.types[number] == self.small

    @cached_property
    def by_sample(self) -> bool:
        """True if constants and sums are those of a channel of one sample."""
        return any(expression_of(member).by_sample for member in self.members)

    @cached_property
    def result(self) -> TensorType:
        """Type of the results, and of what is summed."""
        stored = [n for n in self.given if not self.is_summed(n)]
        summed = [m.inputs[0] for m in self.members if self.sums.intersection(m.outputs)]
        return self.types[(*stored, *summed)[0]]

    def places(self) -> tuple[Place, ...] | None:
        """Return the place of every value; None if a value is read at two different places, or no kernel can run it."""
        result, small = self.result, self.small
        if result.elements == 0 or (self.sums and len(result.shape) < 2):
            return None
        if any(self.types[n] != result for n in self.given if not self.is_summed(n)):
            return None
        if small is None:
            of_samples = {len(self.types[n].shape) > 1 for n in self.sums}
            fits = self.sums <= set(self.given) and of_samples <= {self.by_sample}
        else:
            inside = all(expression_of(m).inside for m in self.members if expression_of(m).sums)
            fits = inside and {self.types[n] for n in self.sums} == {small} and small.elements < result.elements
            fits = fits and len(small.shape) == len(result.shape)
            fits = fits and any(summed_image(small, result, layout) for layout in LAYOUTS)
        if not fits:
            return None
        at_sums = (0,) if small is None else whole_place(small)
        places = {n: at_sums if self.is_summed(n) else whole_place(result) for n in self.given}
        for member in reversed(self.members):
            output = member.outputs[0]
            if output not in places or (small is None and not self.sums.isdisjoint(member.inputs)):
                return None
            reduces = output in self.sums
            space, at = (result, whole_place(result)) if reduces else (self.types[output], places[output])
            for number in member.inputs:
                place = operand_place(member.attributes, self.types[number], space, at)
                if places.setdefault(number, place) != place:
                    return None
            if reduces and self.types[member.inputs[0]].shape != result.shape:
                return None
        return tuple(places[number] for number in range(len(self.types)))


def _lowered(request: Request, values: _Values, places: Sequence[Place]) -> Lowered | None:
    inputs, result = request.inputs, values.result
    small = values.small
    if small is None:
        vectors = [n for n, x in enumerate(inputs) if is_vector(x, places[n], result, values.by_sample)]
    else:
        vectors = [n for n, x in enumerate(inputs) if x.shape == small.shape and places[n] == whole_place(small)]
    samples = tuple(n for n in vectors if len(inputs[n].shape) > 1)
    whole = tuple(n for n, x in enumerate(inputs) if n not in vectors and is_whole(x, places[n], result))
    repeated = tuple(n for n in range(len(inputs)) if n not in whole and n not in vectors)
    if samples and (repeated or not whole):
        return None
    if repeated or not whole:
        repeated, vectors = tuple(n for n in range(len(inputs)) if n not in whole), []
    if any(inputs[n].dtype is not result.dtype for n in (*whole, *repeated)):
        return None
    names = {n: f"x[{at}]" for at, n in enumerate((*whole, *repeated))} | {n: f"c{n}" for n in vectors}
    lines = _Lines(dict(names), {names[n] for n in vectors})
    for member in values.members:
        lines.add(member)
    stored = [(at, lines.names[n]) for at, n in enumerate(values.given) if not values.is_summed(n)]
    results = tuple(name for _, name in stored)
    outside = lines.channel | lines.final  # values that the loop over elements does not compute
    if not all(_NAME.fullmatch(name) for name in results) or outside.intersection((*results, *lines.sums)):
        return None
    small_outputs = tuple((at, lines.names[n]) for at, n in enumerate(values.given) if small and values.is_summed(n))
    of_elements = {"x", *(line.name for line in lines.lines if line.name not in outside)}  # `finish` cannot read these
    if not of_elements.isdisjoint((*lines.final_read, *(name for _, name in small_outputs))):
        return None
    if len(lines.sums) > MOST_SUMS or (lines.sums and repeated):
        return None
    program = MapProgram(
        element=_c_type(result.dtype),
        inputs=len(inputs),
        whole=whole,
        repeated=repeated,
        vectors=tuple((n, _c_type(inputs[n].dtype)) for n in vectors),
        reals=len(lines.reals),
        channel_lines=tuple(line for line in lines.lines if line.name in lines.channel),
        kept=lines.kept(),
        lines=tuple(line for line in lines.lines if line.name not in outside),
        results=results,
        stored=tuple(at for at, _ in stored),
        sums=tuple(lines.sums),
        finishes=tuple((at, lines.finishes[n]) for at, n in enumerate(values.given) if n in lines.finishes),
        by_sample=samples,
        final_lines=tuple(line for line in lines.lines if line.name in lines.final),
        small=small_outputs,
    )
    return Lowered(program, result, tuple(places[: len(inputs)]), tuple(lines.reals), small)


def expression_of(operation: Member | Operation) -> Expression:
    """Return the device expression of an operation that has one."""
    device = KINDS[operation.kind].device
    assert device is not None
    return device(operation.attributes, len(operation.inputs))


def _c_type(dtype: DType) -> str:
    return "float" if dtype is DType.FP32 else "MbcWorking"


@dataclass
class _Lines:
    """Lines so far, by the names of the values that they compute; equal lines are one.

    Attributes:
        names: Text of each value of the group, by its number.
        channel: Names of values that are constants of a channel.
        sums: Values of an element that are summed.
        finishes: Texts of the outputs of reductions, by their numbers.
        final: Names of values that follow from sums.
        final_read: Names in the texts of the final lines.
    """

    names: dict[int, str]
    channel: set[str]
    lines: list[Line] = field(default_factory=list[Line])
    reals: list[float] = field(default_factory=list[float])
    sums: list[str] = field(default_factory=list[str])
    finishes: dict[int, str] = field(default_factory=dict[int, str])
    final: set[str] = field(default_factory=set[str])
    final_read: set[str] = field(default_factory=set[str])
    _numbers: dict[tuple[str, float], str] = field(default_factory=dict[tuple[str, float], str])
    _by_text: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, member: Member) -> None:
        """Append the lines of an operation."""
        expression = expression_of(member)
        local = dict(zip(expression.operands, (self.names[n] for n in member.inputs), strict=True))
        for name, value in expression.reals:
            if (name, value) not in self._numbers:  # equal settings of one name give equal lines
                self._numbers[name, value] = f"r{len(self.reals)}"
                self.reals.append(value)
            local[name] = self._numbers[name, value]
        *earlier, last = (part.strip() for part in expression.text.split(";"))
        for line in earlier:
            name, _, text = line.partition(" = ")
            local[name] = self._line(text, local)
        if not expression.sums:
            self.names[member.outputs[0]] = self._line(last, local)
            return
        for number, text in enumerate(expression.sums):
            local[f"sum{number}"] = f"sums[{len(self.sums)}]"
            self.sums.append(self._line(text, local))
        if expression.inside:
            self.names[member.outputs[0]] = self._line(expression.finishes[0], local)
            return
        for output, text in zip(member.outputs, expression.finishes, strict=True):
            self.finishes[output] = _renamed(text, local)

    def _line(self, text: str, local: dict[str, str]) -> str:
        """Return the name of a line's value, whose text is over the names of one operation."""
        read = {local[name] for name in _names(text) if name in local}
        text = _renamed(text, local)
        if text in self._by_text:
            return self._by_text[text]
        name = self._by_text[text] = f"v{len(self.lines)}"
        self.lines.append(Line(name, text))
        values = {value for value in read if not re.fullmatch(r"r\d+", value)}
        if any(value in self.final or value.startswith("sums[") for value in values):
            self.final.add(name)
            self.final_read.update(_names(text))
        elif values and values <= self.channel and not _OBJECT.match(text):
            self.channel.add(name)
        return name

    def kept(self) -> tuple[str, ...]:
        """Return the constants of a channel that lines of elements read, in order."""
        outside = self.channel | self.final
        read = {name for line in self.lines if line.name not in outside for name in _names(line.text)}
        inputs = sorted(name for name in self.channel & read if name.startswith("c"))
        return (*inputs, *(line.name for line in self.lines if line.name in self.channel & read))


def _renamed(text: str, local: dict[str, str]) -> str:
    return _NAME.sub(lambda name: local.get(name[0], name[0]) if _is_free(text, name) else name[0], text)


def _names(text: str) -> list[str]:
    return [name[0] for name in _NAME.finditer(text) if _is_free(text, name)]


def _is_free(text: str, name: re.Match[str]) -> bool:
    """Return whether a name is not that of an object's member, nor part of a number such as 1.0f."""
    return name.start() == 0 or not (text[name.start() - 1] == "." or text[name.start() - 1].isdigit())
