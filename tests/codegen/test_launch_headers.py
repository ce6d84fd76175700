"""The integers of a launch are declared in Python, and C++ reads them by the same names in the same order."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from types import ModuleType

from mbc.codegen.launch_headers import launch_headers
from mbc.kernels.cuda import KERNELS
from mbc.kernels.cuda.image import ImageArguments
from mbc.kernels.launch_operands import Launcher, count, operands_header
from mbc.kernels.launch_struct import Struct, header, header_name
from mbc.resources import folder


@dataclass(frozen=True, slots=True)
class Bare(Struct):
    """Integers of one launch.

    The sizes of every part follow.

    Attributes:
        pass_: Number of the pass, whose text
            goes on here.
    """

    pass_: int
    parts: int


@dataclass(frozen=True, slots=True)
class Longer(ImageArguments):
    """Integers of another launch."""

    affine: bool


def test_a_header_declares_the_structures_of_one_file() -> None:
    module = ModuleType(__name__)
    vars(module).update(Bare=Bare, Longer=Longer, elsewhere=ImageArguments, Struct=Struct)
    assert header(module) == (
        "// Integers of launches, generated from tests/codegen/test_launch_headers.py.\n"
        "#pragma once\n\n#include <cstdint>\n\n"
        '#include "image_arguments.h"\n\n'
        "// Integers of one launch.\n"
        "// The sizes of every part follow.\n"
        "struct Bare {\n"
        "  int64_t pass;  // Number of the pass, whose text goes on here.\n"
        "  int64_t parts;\n"
        "};\n\n"
        "// Integers of another launch.\n"
        "struct Longer : ImageArguments {\n"
        "  int64_t affine;\n"
        "};\n"
    )
    assert header_name(__name__) == "test_launch_headers_arguments.h"
    assert Bare.names() == ("pass", "parts")
    assert Longer(1, 2, 3, 4, 5, affine=True).integers() == (1, 2, 3, 4, 5, 1)


def test_operands_are_taken_from_the_pointers_in_their_order() -> None:
    first = Launcher("first", "x gamma?affine k?!affine parts[inner*2*rows] workspace?", Longer)
    text = operands_header("some_source", [first, Launcher("second", "-x y", Bare)])
    assert text == (
        "// Operands of the launches of some_source.cu by name, generated from their declarations in Python.\n"
        '#pragma once\n\n#include "launch.cuh"\n#include "test_launch_headers_arguments.h"\n\n'
        "namespace mbc {\n\n"
        "struct SomeSourceOperands {\n"
        "  Operand x;\n  Operand gamma;\n  Operand k;\n  OperandList parts;\n  Operand workspace;\n  Operand y;\n"
        "};\n\n"
        "inline SomeSourceOperands operands_of_first(const MbcCall& call) {\n"
        "  const auto& a = *reinterpret_cast<const Longer*>(call.integers);\n"
        "  SomeSourceOperands at;\n"
        "  void* const* next = call.pointers;\n"
        "  at.x.pointer = *next++;\n"
        "  if (a.affine) at.gamma.pointer = *next++;\n"
        "  if (!a.affine) at.k.pointer = *next++;\n"
        "  at.parts.pointers = next;\n"
        "  next += a.inner * 2 * a.rows;\n"
        "  if (next < call.pointers + call.pointer_count) at.workspace.pointer = *next++;\n"
        "  return at;\n"
        "}\n\n"
        "inline SomeSourceOperands operands_of_second(const MbcCall& call) {\n"
        "  SomeSourceOperands at;\n"
        "  void* const* next = call.pointers;\n"
        "  at.y.pointer = *next++;\n"
        "  return at;\n"
        "}\n\n"
        "}  // namespace mbc\n"
    )
    assert count(first, {"affine": 0, "inner": 3, "rows": 1}, has_workspace=False) == 1 + 1 + 6
    assert count(first, {"affine": 1, "inner": 3, "rows": 2}, has_workspace=True) == 1 + 1 + 12 + 1


def test_every_structure_is_declared_once_and_holds_integers_alone() -> None:
    declared = re.findall(r"^struct (\w+)", "".join(launch_headers().values()), re.MULTILINE)
    structs = {kernel.struct for kernel in KERNELS.values()} - {Struct}
    assert len(declared) == len(set(declared)) and {struct.__name__ for struct in structs} < set(declared)
    assert {str(field.type) for struct in structs for field in fields(struct)} == {"int"}


def test_codes_of_types_and_layouts_are_those_that_structures_hold() -> None:
    assert launch_headers()["mbc_types.h"].endswith(
        "enum MbcType : int64_t { MBC_FP32 = 0, MBC_BF16 = 1, MBC_FP16 = 2, MBC_INT32 = 3, MBC_UINT8 = 4 };\n"
        "enum MbcLayout : int64_t { MBC_CHANNELS_FIRST = 0, MBC_CHANNELS_LAST = 1 };\n"
    )


def test_sources_include_what_python_declares_and_do_not_repeat_it() -> None:
    sources = [path for path in folder("templates").rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    generated = launch_headers()
    struct, include = (
        re.compile(r"^struct (\w+)", re.MULTILINE),
        re.compile(r'#include "(\w+_(?:arguments|operands)\.h)"'),
    )
    assert not set(struct.findall("".join(texts))) & set(struct.findall("".join(generated.values())))
    assert {*include.findall("".join((*texts, *generated.values())))} == generated.keys() - {"mbc_types.h"}
