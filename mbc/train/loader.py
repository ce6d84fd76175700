"""Batches from a user's Python function: found by its name, called once an epoch, cut to the mini-batch."""

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
    """A function that yields batches of any number of rows, which are cut to the mini-batch.

    The function is called once an epoch, with `epoch=` if it has such a parameter. It shuffles by itself. Each of
    several ranks calls it and takes its own rows of each mini-batch. If it has the parameters `rank` and `ranks`, it
    yields the rows of that rank alone.
    """

    function: Callable[..., Iterable[Any]]
    inputs: tuple[Input, ...]
    name: str

    @property
    def rows(self) -> None:
        """None: the number of rows is known only after reading them."""
        return None

    @property
    def common(self) -> bool:
        """True if the function yields all rows on every rank."""
        return "rank" not in _parameters(self.function)

    def shuffled(self, share: Share, seed: int, epoch: int, after: int = 0) -> Iterator[Part]:
        """Return a rank's parts of the mini-batches of one epoch, without the first `after` mini-batches.

        Raises:
            MbcError: MBC182 if the function yields fewer than `after` whole mini-batches.
        """
        whole = share.batch if self.common else share.rows
        batches = self._batches(share, whole, epoch)
        # Mini-batches before `after` are read, too: a function's results cannot be skipped.
        there = sum(len(arrays[0]) == whole for arrays in islice(batches, after))
        if there < after:
            raise MbcError(
                "MBC182",
                f"the checkpoint was written after step {after} of an epoch, but"
                f" {self.name} yields only {there} mini-batches",
                "resume with the same data: for each epoch the function must yield the same mini-batches again",
            )
        for arrays in batches:
            rows = len(arrays[0])
            mark = mark_of(arrays) if self.common and share.ranks > 1 else 0
            own = tuple(array[share.first : share.stop] for array in arrays) if self.common else arrays
            yield Part(own, rows, rows == whole, mark)

    def in_order(self, share: Share) -> Iterator[Batch]:
        """Return a rank's share of all rows once, up to `share.rows` rows at a time."""
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
            # A batch of exactly the mini-batch's size is passed on without a copy.
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
                "start again at each call: it is called once an epoch, and an iterator that has ended yields no more",
            )

    def _items(self, share: Share, epoch: int) -> Iterator[Any]:
        """Yield the function's batches; MBC171 with the function's own error if it raises one."""
        offered = {"epoch": epoch, "rank": share.rank, "ranks": share.ranks}
        taken = {name: offered[name] for name in _parameters(self.function)}
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
        except Exception as error:  # a user's function may raise any error
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
                    f"{self.name} yields {len(row)} arrays a batch, but the network has {len(self.inputs)} inputs: "
                    + ", ".join(i.name for i in self.inputs),
                    "yield a tuple of one array per input, in this order, or a dict with their names",
                )
            parts = {i.name: part for i, part in zip(self.inputs, row, strict=True)}
        return {name: _array(part, name, where) for name, part in parts.items()}


def find_function(place: str) -> Callable[..., Iterable[Any]]:
    """Return the function that `module:function` names.

    Raises:
        MbcError: MBC172 if there is none, MBC171 if it cannot be called.
    """
    module, _, function = place.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # The path of an installed command does not include the current folder, which the user means. It comes last, so
        # that a folder in it does not hide a package of Python with the same name.
        sys.path.append(here)
    try:
        member = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # an import may raise any error
        raise MbcError(
            "MBC172",
            f"cannot import {place}: {error if isinstance(error, ImportError | AttributeError) else _shown(error)}",
            "check the names, or add its folder to PYTHONPATH",
        ) from error
    if not callable(member):
        raise MbcError("MBC172", f"{place} is not a function", "name a function that yields batches")
    _check_signature(member, place)
    return cast("Callable[..., Iterable[Any]]", member)


def _check_signature(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # a function that is not written in Python is checked by the call
    try:
        signature.bind(**dict.fromkeys(_parameters(function), 0))
    except TypeError as error:
        raise MbcError(
            "MBC171",
            f"{name} cannot be called: it takes {signature} ({error})",
            "give a function that yields the batches of one epoch, without arguments, or with some of `epoch`,"
            " `rank` and `ranks`",
        ) from None


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters of a function that mbc can pass: `epoch`, `rank` and `ranks`."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return ()
    return tuple(name for name in ("epoch", "rank", "ranks") if name in signature.parameters)


def _array(given: Any, name: str, where: str) -> Array:
    try:
        return np.asarray(given)
    except Exception as error:  # the object may raise any error
        raise MbcError(
            "MBC171",
            f"{where} yields {with_article(type(given).__name__)} for '{name}' that is not an array: {error}",
            "yield NumPy arrays (for a PyTorch tensor: tensor.numpy())",
        ) from error


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place_in(function: Callable[..., Any], error: Exception) -> str:
    """Return the line of the function's own file that raised an error, or else the line of any file."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame belongs to this file
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
