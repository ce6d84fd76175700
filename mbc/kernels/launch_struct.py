"""Integers of launches: a dataclass for each kind of launch, and the C++ header in which launchers read them.

Python is the only declaration. Wherever sources are written, each Python file with structures gets a header
`<file>_arguments.h` beside them (`mbc.codegen.launch_headers`), so that an object in the cache depends only on the
structures of the files that its source includes.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import astuple, dataclass, fields
from types import ModuleType

_NOTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Struct:
    """Integer arguments of a launch, which the launcher reads as a C++ structure of this name with these fields.

    A name that Python reserves ends in an underscore, which C++ has not.
    """

    def integers(self) -> tuple[int, ...]:
        """Return the fields in the order of their declaration."""
        return tuple(int(value) for value in astuple(self))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields as C++ has them, in the order of `integers`."""
        return tuple(field.name.removesuffix("_") for field in fields(cls))


def structs_of(module: ModuleType) -> list[type[Struct]]:
    """Return the structures that a Python file declares, in order."""
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Struct)]
    return [struct for struct in classes if struct.__module__ == module.__name__ and struct is not Struct]


def header_name(module: str) -> str:
    """Return the name of the header with the structures of a Python file, whose module is `module`."""
    return f"{module.rpartition('.')[2]}_arguments.h"


def header(module: ModuleType) -> str:
    """Return the C++ header with the structures of a Python file; what docstrings say of fields becomes comments."""
    structs = structs_of(module)
    bases = [base.__module__ for struct in structs if (base := _base(struct)) and base.__module__ != module.__name__]
    includes = "".join(f'\n#include "{header_name(base)}"' for base in dict.fromkeys(bases))
    file = f"{module.__name__.replace('.', '/')}.py"
    opening = f"// Integers of launches, generated from {file}.\n#pragma once\n\n#include <cstdint>\n{includes}"
    return "\n\n".join((opening.rstrip(), *map(_declaration, structs))) + "\n"


def _base(struct: type[Struct]) -> type[Struct] | None:
    """Return the structure that `struct` begins with, if there is one."""
    base = struct.__mro__[1]
    return base if base is not Struct and issubclass(base, Struct) else None


def _declaration(struct: type[Struct]) -> str:
    base = _base(struct)
    document = inspect.cleandoc(struct.__doc__ or "")
    about = document.partition("\nAttributes:")[0].split("\n")
    notes = {name.removesuffix("_"): " ".join(text.split()) for name, text in _NOTE.findall(document)}
    own = struct.names()[len(base.names()) if base else 0 :]
    lines = [f"  int64_t {name};" + (f"  // {notes[name]}" if name in notes else "") for name in own]
    opening = f"struct {struct.__name__}{f' : {base.__name__}' if base else ''} {{"
    return "\n".join((*(f"// {line}" for line in about if line), opening, *lines, "};"))
