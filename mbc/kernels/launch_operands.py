"""Operands of launches by name: declared in Python, in the order of a call's pointers, and read by name in C++.

A declaration is a text of terms:

* `x`: one operand
* `gamma?affine`: an operand of launches whose structure has a value other than 0 in the field `affine`
* `k?!packed`: an operand of launches that have 0 there
* `workspace?`: an operand of launches that have one pointer more, which comes last
* `parts[inputs]` or `pairs[inputs*2]`: as many operands as the field `inputs` says, or twice as many; the second factor
  may be a field, too
* `-x`: no operand of this launcher, but of others that share its code in C++

The launchers of one source share one C++ structure, `<Source>Operands`, in which the names of others are null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mbc.kernels.launch_struct import Struct, header_name

_TERM = re.compile(r"(?P<absent>-?)(?P<name>\w+)(?P<sign>\?!?|\[)?(?P<field>[\w*]*)\]?")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A C function with the names of its operands.

    Attributes:
        function: Name of the function, without the prefix `mbc_`.
        operands: Declaration of its operands.
        struct: Integers that it reads.
    """

    function: str
    operands: str
    struct: type[Struct]

    @property
    def symbol(self) -> str:
        """Name of the function in a library."""
        return f"mbc_{self.function}"


def count(launcher: Launcher, integers: Mapping[str, int], has_workspace: bool) -> int:
    """Return the number of operands of a launch with these integers."""
    total = 0
    for term in _terms(launcher):
        match term["sign"], term["field"]:
            case "[", field:
                total += math.prod(int(f) if f.isdecimal() else integers[f] for f in field.split("*"))
            case "?", "":
                total += has_workspace
            case "?" | "?!" as sign, field:
                total += (integers[field] == 0) is (sign == "?!")
            case _:
                total += not term["absent"]
    return total


def operands_header(source: str, launchers: list[Launcher]) -> str:
    """Return the header with the operands of the launchers of the source file `<source>.cu`."""
    struct = "".join(part.capitalize() for part in source.split("_")) + "Operands"
    terms = {term["name"]: term for launcher in launchers for term in _terms(launcher)}
    members = [f"  {'OperandList' if term['sign'] == '[' else 'Operand'} {name};" for name, term in terms.items()]
    includes = sorted({header_name(launcher.struct.__module__) for launcher in launchers if _fields(launcher)})
    parts = (
        f"// Operands of the launches of {source}.cu by name, generated from their declarations in Python.",
        "#pragma once\n",
        '#include "launch.cuh"',
        *(f'#include "{name}"' for name in includes),
        f"\nnamespace mbc {{\n\nstruct {struct} {{",
        *members,
        "};",
        *(_function(launcher, struct) for launcher in launchers),
        "\n}  // namespace mbc\n",
    )
    return "\n".join(parts)


def _terms(launcher: Launcher) -> list[dict[str, str]]:
    matches = [_TERM.fullmatch(term) for term in launcher.operands.split()]
    return [match.groupdict(default="") for match in matches if match]


def _fields(launcher: Launcher) -> set[str]:
    """Return the fields of the structure that say which operands there are."""
    return {term["field"] for term in _terms(launcher)} - {""}


def _function(launcher: Launcher, struct: str) -> str:
    reads = f"  const auto& a = *reinterpret_cast<const {launcher.struct.__name__}*>(call.integers);\n"
    lines = [line for term in _terms(launcher) if (line := _taken(term))]
    return (
        f"\ninline {struct} operands_of_{launcher.function}(const MbcCall& call) {{\n"
        f"{reads if _fields(launcher) else ''}  {struct} at;\n  void* const* next = call.pointers;\n"
        f"{''.join(lines)}  return at;\n}}"
    )


def _taken(term: Mapping[str, str]) -> str:
    """Return the line that takes the operand of a term from the call's pointers."""
    name, field = term["name"], term["field"]
    if term["absent"]:
        return ""
    if term["sign"] == "[":
        many = " * ".join(factor if factor.isdecimal() else f"a.{factor}" for factor in field.split("*"))
        return f"  at.{name}.pointers = next;\n  next += {many};\n"
    there = f"if ({term['sign'][1:]}a.{field}) " if field else ""
    if term["sign"] and not field:
        there = "if (next < call.pointers + call.pointer_count) "
    return f"  {there}at.{name}.pointer = *next++;\n"
