"""The owner of each byte of a plan's memory while its programs run: the interpreter's proof that a plan is sound.

For every byte the shadow stores the buffer that last wrote it. A launch may read only bytes that its own buffer owns.
Two buffers that overlap in space and time, a copy that comes too late, or a slice that was never written are thus
errors at the first wrong byte. Which bytes a launch accesses does not depend on data: a program that passed once with
some order of its launches passes every time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.plan.model import Access, Buffer, Plan, Program, Rows

_NOBODY = -1
_REMEDY = "this is a mistake of the compiler, not of the network: report it with the plan file"


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [start, stop) of a space, which hold `rows` of a buffer."""

    space: Space
    start: int
    stop: int
    buffer: int
    rows: Rows


def region_of(plan: Plan, index: int, rows: Rows) -> Region:
    """Return the bytes of some rows of a buffer.

    Raises:
        MbcError: MBC143 if the buffer does not hold these rows.
    """
    buffer = plan.buffers[index]
    if not buffer.rows.start <= rows.start < rows.stop <= buffer.rows.stop:
        raise MbcError("MBC143", f"rows [{rows.start}, {rows.stop}) are not in buffer {describe(plan, index)}", _REMEDY)
    row_bytes = buffer.size_bytes // buffer.rows.count
    start = plan.offsets[index] + (rows.start - buffer.rows.start) * row_bytes
    return Region(buffer.space, start, start + rows.count * row_bytes, index, rows)


def access_region(plan: Plan, access: Access) -> Region:
    """Return the bytes that an access reads or writes."""
    return region_of(plan, access.buffer, access.rows)


def describe(plan: Plan, index: int) -> str:
    """Return a buffer's index, value and rows, for messages."""
    buffer = plan.buffers[index]
    what = "workspace" if buffer.value is None else f"'{buffer.value}'"
    return f"{index} ({what}, rows [{buffer.rows.start}, {buffer.rows.stop}))"


class Shadow:
    """The owner of each byte of the arena and of the spaces outside it, as indices of `plan.buffers`."""

    def __init__(self, plan: Plan) -> None:
        """Create a shadow in which no byte has an owner."""
        self._plan = plan
        self._owners: dict[Space, NDArray[np.int32]] = {
            space: np.full(plan.predictions.bytes_of(space), _NOBODY, np.int32) for space in Space
        }
        self._persistent: tuple[int, ...] = ()

    def begin(self, entry: Iterable[int], persistent: Iterable[int]) -> None:
        """Forget all owners but those of the buffers that a program starts with.

        Args:
            entry: Buffers that hold values when the program starts.
            persistent: Buffers of states, which must be intact when the program ends.
        """
        for owners in self._owners.values():
            owners.fill(_NOBODY)
        persistent = tuple(persistent)
        for index in (*persistent, *entry):
            self.write(self._whole(index))
        # A state may have different buffers in the two programs; the running program's buffer is checked.
        self._persistent = tuple(i for i in persistent if self._first_stranger(self._whole(i), (i,)) is None)

    def write(self, region: Region) -> None:
        """Make the region's buffer the owner of its bytes."""
        self._owners[region.space][region.start : region.stop] = region.buffer

    def read(self, region: Region, where: str) -> None:
        """Check that every byte of the region belongs to its buffer.

        Raises:
            MbcError: MBC141 (another buffer owns bytes) or MBC142 (bytes were never written), with the first wrong
                bytes.
        """
        stranger = self._first_stranger(region, (region.buffer,))
        if stranger is None:
            return
        start, stop, owner = stranger
        reader = f"{where} reads bytes [{region.start}, {region.stop}) of buffer {describe(self._plan, region.buffer)}"
        if owner == _NOBODY:
            raise MbcError("MBC142", f"{reader}, but bytes [{start}, {stop}) were never written", _REMEDY)
        other = describe(self._plan, owner)
        raise MbcError("MBC141", f"{reader}, but bytes [{start}, {stop}) belong to buffer {other}", _REMEDY)

    def end(self, program: Program, name: str) -> None:
        """Check a program's exit buffers and every state at its end; errors are MBC141 and MBC142."""
        for index in program.exit:
            self.read(self._whole(index), f"the end of {name}")
        for index in self._persistent:
            region = self._whole(index)
            if self._first_stranger(region, self._versions(region)) is not None:
                self.read(region, f"the next step after {name}")

    def _whole(self, index: int) -> Region:
        return region_of(self._plan, index, self._plan.buffers[index].rows)

    def _first_stranger(self, region: Region, friends: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return the first run of bytes [start, stop) that none of `friends` owns, with its owner, or None."""
        owners = self._owners[region.space][region.start : region.stop]
        strange = owners != friends[0]
        for friend in friends[1:]:
            strange &= owners != friend
        if owners.size == region.stop - region.start and not strange.any():
            return None
        first = int(strange.argmax())
        owner = int(owners[first]) if owners.size else _NOBODY
        same = owners[first:] == owner
        length = int(same.argmin()) if not same.all() else same.size
        return region.start + first, region.start + first + length, owner

    def _versions(self, region: Region) -> tuple[int, ...]:
        """Return the buffer itself, and the owner of its first byte if that is a later version of the same state."""
        owner = int(self._owners[region.space][region.start])
        index: int | None = owner
        while index is not None and index != region.buffer:
            buffer: Buffer | None = self._plan.buffers[index] if index >= 0 else None
            index = buffer.alias if buffer is not None else None
        return (region.buffer,) if index is None else (region.buffer, owner)
