"""Ways to change a file in the safetensors format: bytes, offsets, types, names and counters.

Some changes leave the file valid.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
         "U8": 1, "BOOL": 1, "F8_E5M2": 1, "F8_E4M3": 1, "C64": 8}  # fmt: skip
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
         "U32": "<u4", "U16": "<u2", "U8": "u1"}  # fmt: skip
STRANGE = (-5, -1, 0, 1, 2, 3, 1.5, "4", None, True, [], {}, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, 10**30)

Entry = dict[str, Any]


@dataclass
class Draft:
    """A file in the making: its entries in order, which may name a tensor twice, and its bytes."""

    entries: list[tuple[str, Any]]
    data: bytearray
    length: int | None = None  # of the header as the file says, where that is not its own

    @staticmethod
    def of(file: bytes) -> Draft:
        """Return the header and the bytes of a file as a draft."""
        length = int.from_bytes(file[:8], "little")
        return Draft(list(json.loads(file[8 : 8 + length]).items()), bytearray(file[8 + length :]))

    def bytes(self) -> bytes:
        """Return the file of the parts."""
        text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in self.entries) + "}"
        length = len(text.encode()) if self.length is None else self.length
        return (length % 2**64).to_bytes(8, "little") + text.encode() + bytes(self.data)

    def tensors(self) -> list[tuple[str, Entry]]:
        """Return the entries of the header that are tensors, with their names."""
        return [(name, entry) for name, entry in self.entries if name != "__metadata__"]

    def any(self, draw: random.Random) -> Entry:
        """Return the entry of a random tensor."""
        return draw.choice(self.tensors())[1]

    def lay_out(self, content: dict[str, bytes]) -> None:
        """Place the tensors one behind the other, in the order of the entries."""
        self.data = bytearray()
        for name, entry in self.tensors():
            entry["data_offsets"] = [len(self.data), len(self.data) + len(content[name])]
            self.data += content[name]

    def contents(self) -> dict[str, bytes]:
        """Return the bytes of each tensor."""
        return {name: bytes(self.data[slice(*entry["data_offsets"])]) for name, entry in self.tensors()}


def flip_header(file: bytearray, draw: random.Random) -> None:
    """Flip one to three bits of the header."""
    length = int.from_bytes(file[:8], "little")
    for _ in range(draw.randint(1, 3)):
        file[draw.randrange(8, 8 + length)] ^= 1 << draw.randrange(8)


def flip_data(file: bytearray, draw: random.Random) -> None:
    """Flip one to four bits of the data."""
    length = int.from_bytes(file[:8], "little")
    for _ in range(draw.randint(1, 4)):
        file[draw.randrange(8 + length, len(file))] ^= 1 << draw.randrange(8)


def flip_length(file: bytearray, draw: random.Random) -> None:
    """Flip a bit of the header's length."""
    file[draw.randrange(8)] ^= 1 << draw.randrange(8)


def cut(file: bytearray, draw: random.Random) -> None:
    """Cut the file at a random byte."""
    del file[draw.randrange(len(file)) :]


def extend(file: bytearray, draw: random.Random) -> None:
    """Insert bytes; in half of the cases at the end."""
    at = draw.choice((len(file), draw.randrange(len(file))))
    file[at:at] = draw.randbytes(draw.randint(1, 16))


def lengths(draft: Draft, draw: random.Random) -> None:
    """Replace the length of the header."""
    own = len(draft.bytes()) - 8 - len(draft.data)
    draft.length = draw.choice((0, 1, 2, own - 1, own + 1, own + 8, 100_000_000, 100_000_001, 2**63, 2**64 - 8))


def overlap(draft: Draft, draw: random.Random) -> None:
    """Let the data of two tensors overlap."""
    source, target = draft.any(draw), draft.any(draw)
    target["data_offsets"] = list(source["data_offsets"])
    if draw.random() < 0.5:
        target["dtype"], target["shape"] = source["dtype"], source["shape"]


def gap(draft: Draft, draw: random.Random) -> None:
    """Shift the offsets of the last tensors."""
    first = draw.randrange(len(draft.tensors()) + 1)
    by = draw.choice((1, 4, 8))
    for _, entry in draft.tensors()[first:]:
        entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]
    if draw.random() < 0.7:
        draft.data += bytes(by)


def offsets(draft: Draft, draw: random.Random) -> None:
    """Replace the offsets of a tensor."""
    entry = draft.any(draw)
    how = draw.randrange(4)
    if how == 0:
        entry["data_offsets"][draw.randrange(2)] = draw.choice(STRANGE)
    elif how == 1:
        entry["data_offsets"] = [offset + draw.choice((2**63, 2**64 - 4)) for offset in entry["data_offsets"]]
    elif how == 2:
        entry["data_offsets"].reverse()
    else:
        entry["data_offsets"] = draw.choice(([], [0], [0, 4, 8], None, "0", {}))


def twice(draft: Draft, draw: random.Random) -> None:
    """Write the entry of a tensor twice."""
    at = draw.randrange(len(draft.entries))
    name, entry = draft.entries[at]
    again = json.loads(json.dumps(entry))
    if draw.random() < 0.5 and name != "__metadata__":
        again[draw.choice(("data_offsets", "shape"))] = draw.choice(draft.tensors())[1]["data_offsets"]
    draft.entries.insert(draw.randrange(len(draft.entries) + 1), (name, again))


def dtypes(draft: Draft, draw: random.Random) -> None:
    """Replace the type of a tensor."""
    draft.any(draw)["dtype"] = draw.choice((*SIZES, "F99", "f32", "", None, 4))


def converted(draft: Draft, draw: random.Random) -> None:
    """Convert a tensor to a random type, and lay the file out again."""
    contents = draft.contents()
    name, entry = draw.choice(draft.tensors())
    old = np.frombuffer(contents[name], NUMPY[entry["dtype"]])
    entry["dtype"] = draw.choice([dtype for dtype in SIZES if dtype not in ("BF16", "C64")])
    if entry["dtype"] in NUMPY:
        with np.errstate(all="ignore"):
            contents[name] = old.astype(NUMPY[entry["dtype"]]).tobytes()
    else:
        contents[name] = bytes(old.size)
    draft.lay_out(contents)


def halved(draft: Draft, draw: random.Random) -> None:
    """Convert about half of the fp32 tensors to bfloat16."""
    contents = draft.contents()
    for name, entry in draft.tensors():
        if entry["dtype"] == "F32" and draw.random() < 0.5:
            entry["dtype"] = "BF16"
            contents[name] = np.frombuffer(contents[name], "<u2")[1::2].tobytes()
    draft.lay_out(contents)


def shapes(draft: Draft, draw: random.Random) -> None:
    """Change the shape of a tensor."""
    shape = draft.any(draw)["shape"]
    how = draw.randrange(6)
    if how == 0:
        shape[draw.randrange(len(shape))] = draw.choice(STRANGE)
    elif how == 1:
        shape.insert(draw.randrange(len(shape) + 1), draw.choice((0, 1, 1, 2, -1)))
    elif how == 2:
        shape.reverse()
    elif how == 3:
        shape[:] = [int(np.prod(shape))]
    elif how == 4:
        shape[:] = [2**32, 2**32, 4]
    else:
        shape.pop()


def names(draft: Draft, draw: random.Random) -> None:
    """Drop, rename or add a tensor, or exchange two."""
    at = draw.randrange(len(draft.entries))
    how = draw.randrange(5)
    if how == 0:
        contents = draft.contents()
        draft.entries.pop(at)
        draft.lay_out({name: contents[name] for name, _ in draft.tensors()})
    elif how == 1:
        draft.entries[at] = (
            draw.choice(("", "w", "__metadata__", "conv.weight ", draft.entries[0][0])),
            draft.entries[at][1],
        )
    elif how == 2:
        draft.entries.append(("more", {"dtype": "F32", "shape": [0], "data_offsets": [len(draft.data)] * 2}))
    elif how == 3:
        draft.entries.pop(at)
    else:
        other = draw.randrange(len(draft.entries))
        (a, first), (b, second) = draft.entries[at], draft.entries[other]
        draft.entries[at], draft.entries[other] = (b, first), (a, second)


def metadata(draft: Draft, draw: random.Random) -> None:
    """Change the metadata."""
    at = next(at for at, (name, _) in enumerate(draft.entries) if name == "__metadata__")
    draft.entries[at] = (
        "__metadata__",
        draw.choice((None, {}, [], 3, "x", {"a": 1}, {"a": None}, {"a": "b"}, {"a": {}})),
    )


def entries(draft: Draft, draw: random.Random) -> None:
    """Drop, add or replace a field of an entry, or replace the entry."""
    entry = draft.any(draw)
    how = draw.randrange(3)
    if how == 0:
        entry.pop(draw.choice(list(entry)))
    elif how == 1:
        entry[draw.choice(("more", "offset", "data"))] = draw.choice(STRANGE)
    else:
        at = draw.randrange(len(draft.entries))
        draft.entries[at] = (draft.entries[at][0], draw.choice((None, [], 3, "x", {})))


def counters(draft: Draft, draw: random.Random) -> None:
    """Change the value of a counter."""
    _, entry = draw.choice([item for item in draft.tensors() if item[0].startswith("control.")])
    start, stop = entry["data_offsets"]
    values: tuple[float, ...] = (-5, -1, 0, 7, 2**32 - 1, 2**32, 2**63 - 1)
    if entry["dtype"] == "F32":
        values = (-5.0, -0.0, 0.0, 1.0, 1024.0, 1e-45, 3e38, float("inf"), float("nan"))
    draft.data[start:stop] = np.array([draw.choice(values)], NUMPY[entry["dtype"]]).tobytes()


def reordered(draft: Draft, draw: random.Random) -> None:
    """Reorder the tensors, which does not change the meaning of the file."""
    contents = draft.contents()
    draw.shuffle(draft.entries)
    if draw.random() < 0.7:
        draft.lay_out(contents)


ON_BYTES: tuple[Callable[[bytearray, random.Random], None], ...] = (flip_header, flip_data, flip_length, cut, extend)
ON_DRAFTS: tuple[Callable[[Draft, random.Random], None], ...] = (
    lengths, overlap, gap, offsets, twice, dtypes, converted, halved, shapes, names, metadata, entries, counters,
    reordered,
)  # fmt: skip
KINDS = (*(how.__name__ for how in ON_BYTES), *(how.__name__ for how in ON_DRAFTS), "several")


def mutant(whole: bytes, kind: str, draw: random.Random) -> bytes:
    """Return `whole` after a mutation of a kind. The kind `several` combines two or three mutations of any kind."""
    for how in ON_BYTES:
        if how.__name__ == kind:
            file = bytearray(whole)
            how(file, draw)
            return bytes(file)
    draft = Draft.of(whole)
    if kind != "several":
        next(how for how in ON_DRAFTS if how.__name__ == kind)(draft, draw)
        return draft.bytes()
    for how in draw.sample(ON_DRAFTS, draw.randint(2, 3)):
        try:
            how(draft, draw)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError):
            break  # nothing sensible is left to mutate
    return draft.bytes()
