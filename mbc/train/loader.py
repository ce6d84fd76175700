"""Batches from a Python function of the user's: found by its name, called once an epoch, cut to the mini-batch."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.train.inputs import Batch, Input, fit
from mbc.train.share import Part, Share, mark_of
from mbc.units import with_article

Array = NDArray[Any]


@dataclass(frozen=True)
class IterableData:
    """A function that yields batches of any number of rows; they are cut anew to the mini-batch.

    It is called once an epoch, with `epoch=` where it has such a parameter. Shuffling is its own business. Of several
    ranks each calls it, and takes its rows of each mini-batch; where it has the parameters `rank` and `ranks`, it
    yields the rows of that rank alone.
    """

    function: Callable[..., Iterable[Any]]
    inputs: tuple[Input, ...]
    name: str

    @property
    def rows(self) -> None:
        return None

    @property
    def common(self) -> bool:
        return "rank" not in _parameters(self.function)

    def shuffled(self, share: Share, seed: int, epoch: int, after: int = 0) -> Iterator[Part]:
        """From mini-batch `after` on. MBC182 where the function yields fewer whole ones than that."""
        whole = share.batch if self.common else share.rows
        batches = self._batches(share, whole, epoch)
        # Those before `after` are read, too: what a function yields cannot be skipped.
        there = sum(len(arrays[0]) == whole for arrays in islice(batches, after))
        if there < after:
            raise MbcError(
                "MBC182",
                f"the checkpoint is of step {after} of an epoch, for which {self.name} yields {there} mini-batches",
                "resume with the data it was made with: a function yields the same mini-batches of an epoch again",
            )
        for arrays in batches:
            rows = len(arrays[0])
            mark = mark_of(arrays) if self.common and share.ranks > 1 else 0
            own = tuple(array[share.first : share.stop] for array in arrays) if self.common else arrays
            yield Part(own, rows, rows == whole, mark)

    def in_order(self, share: Share) -> Iterator[Batch]:
        if not self.common:
            yield from self._batches(share, share.rows, 0)
            return
        for arrays in self._batches(share, share.batch, 0):
            if len(arrays[0]) > share.first:
                yield tuple(array[share.first : share.stop] for array in arrays)

    def _batches(self, share: Share, batch: int, epoch: int) -> Iterator[Batch]:
        waiting: list[Batch] = []
        rows = waiting_rows = 0
        for number, item in enumerate(self._items(share, epoch), 1):
            where = f"{self.name} (batch {number})"
            waiting.append(fit(self._arrays(item, where), self.inputs, where))
            waiting_rows += int(waiting[-1][0].shape[0])
            rows += int(waiting[-1][0].shape[0])
            if waiting_rows < batch:
                continue
            # A batch that is as large as the network's is handed on as it came.
            joined = waiting[0] if len(waiting) == 1 else tuple(
                np.concatenate(parts) for parts in zip(*waiting, strict=True)
            )  # fmt: skip
            whole = waiting_rows - waiting_rows % batch
            for start in range(0, whole, batch):
                yield tuple(part[start : start + batch] for part in joined)
            waiting_rows -= whole
            waiting = [tuple(part[whole:] for part in joined)] if waiting_rows else []
        if waiting_rows:
            yield tuple(np.concatenate(parts) for parts in zip(*waiting, strict=True))
        if not rows:
            raise MbcError(
                "MBC233",
                f"{self.name} yields no rows",
                "begin anew at each call: it is called once an epoch, and an iterator that ended yields nothing more",
            )

    def _items(self, share: Share, epoch: int) -> Iterator[Any]:
        """What the function yields. MBC171 with its own error where it raises one."""
        known = {"epoch": epoch, "rank": share.rank, "ranks": share.ranks}
        taken = {name: known[name] for name in _parameters(self.function)}
        given: Any = self._guarded(lambda: self.function(**taken))
        if not isinstance(given, Iterable):
            raise MbcError(
                "MBC171",
                f"{self.name} returns {given!r:.40}, which holds no batches",
                "yield batches, or return a list or another iterable of them",
            )
        items: Iterator[Any] = self._guarded(lambda: iter(cast("Iterable[Any]", given)))
        ended = object()
        while (item := self._guarded(lambda: next(items, ended))) is not ended:
            yield item

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except MbcError:
            raise
        except Exception as error:  # whatever a user's function raises
            raise MbcError(
                "MBC171", f"{self.name} raises {_shown(error)}{_place_in(self.function, error)}", "correct the function"
            ) from error

    def _arrays(self, item: Any, where: str) -> Mapping[str, Array]:
        if isinstance(item, Mapping):
            parts = {str(name): part for name, part in cast("Mapping[Any, Any]", item).items()}
        else:
            row: Sequence[Any] = cast("Sequence[Any]", item) if isinstance(item, tuple | list) else (item,)
            if len(row) != len(self.inputs):
                raise MbcError(
                    "MBC171",
                    f"{self.name} yields {len(row)} arrays a batch, the network has {len(self.inputs)} inputs: "
                    + ", ".join(i.name for i in self.inputs),
                    "yield a tuple of one array per input, in this order, or a dict with their names",
                )
            parts = {i.name: part for i, part in zip(self.inputs, row, strict=True)}
        return {name: _array(part, name, where) for name, part in parts.items()}


def find_function(place: str) -> Callable[..., Iterable[Any]]:
    """The function that `module:function` names. MBC172 where there is none, MBC171 where it cannot be called."""
    module, _, function = place.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # A script's own folder is not on the path of an installed command; the current folder is what the user means.
        # Last, so that a folder here that is named like a package of Python's does not stand in for it.
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise MbcError(
            "MBC172",
            f"cannot import {place}: {error if isinstance(error, ImportError | AttributeError) else _shown(error)}",
            "check the names, or add its folder to PYTHONPATH",
        ) from error
    if not callable(found):
        raise MbcError("MBC172", f"{place} is not a function", "name a function that yields batches")
    _check_signature(found, place)
    return cast("Callable[..., Iterable[Any]]", found)


def _check_signature(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # of what is not written in Python, calling it tells
    try:
        signature.bind(**dict.fromkeys(_parameters(function), 0))
    except TypeError as error:
        raise MbcError(
            "MBC171",
            f"{name} cannot be called: it takes {signature} ({error})",
            "expected is a function that yields the batches of one epoch, without arguments, or with some of `epoch`,"
            " `rank` and `ranks`",
        ) from None


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Those of what mbc can tell that the function takes."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return ()
    return tuple(name for name in ("epoch", "rank", "ranks") if name in signature.parameters)


def _array(given: Any, name: str, where: str) -> Array:
    try:
        return np.asarray(given)
    except Exception as error:  # whatever the object raises that was yielded
        raise MbcError(
            "MBC171",
            f"{where} yields {with_article(type(given).__name__)} for '{name}' that is no array: {error}",
            "yield NumPy arrays (of a PyTorch tensor: tensor.numpy())",
        ) from error


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place_in(function: Callable[..., Any], error: Exception) -> str:
    """Where in the function's own file an error came up, else where at all."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is of this file
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
