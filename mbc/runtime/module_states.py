"""The states of a module: parameters, statistics, optimizer state and counters, which callers read, write and save.

Checkpoints are here as well, because they need states only, and neither steps nor forward passes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import Role
from mbc.ir.types import Precision
from mbc.ops.shard import part_from
from mbc.runtime.arguments import flag, path_of, plain_array, shown, texts
from mbc.runtime.averaging import check_averages, with_averages
from mbc.runtime.bindings import Place
from mbc.runtime.checkpoint import write_checkpoint
from mbc.runtime.formats import canonical_dtype
from mbc.runtime.opened_plan import OpenedPlan
from mbc.runtime.weights import check_averages_of, counter_tensors, fit_weights, read_weights

Array = NDArray[Any]


class StatefulPlan(OpenedPlan):
    """An open plan whose states callers read, write and save."""

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of parameters, statistics and optimizer state, in the order of the source."""
        return {name: self._places.wholes.get(name, place).shape for name, place in self._places.states.items()}

    def state(self, name: str) -> Array:
        """Return a copy of a state in canonical layout.

        The call is collective for a state that is sharded over several GPUs (`train.shard_optimizer`): all ranks call
        it.

        Raises:
            MbcError: MBC165 if there is no state of that name.
        """
        place = _place_of(self._places.states, name)
        with self._turns:
            whole = self._places.wholes.get(name)
            return self._machine.read(place) if whole is None else self._machine.gathered(place, whole)

    def set_state(self, name: str, array: Array) -> None:
        """Overwrite a state with an array of its shape in canonical layout.

        Raises:
            MbcError: MBC165 if there is no state of that name, or if shape or type do not fit.
        """
        place = _place_of(self._places.states, name)
        shape = self._places.wholes.get(name, place).shape
        array = plain_array(name, array)
        if array.shape != shape or array.dtype.kind not in "fiu":
            got = f"{array.dtype} {list(array.shape)}"
            raise MbcError(
                "MBC165", f"state '{name}' has the shape {list(shape)}, got {got}", "pass an array of this shape"
            )
        with self._turns, self._changing() as machine:
            machine.write(place, self._own_part(place, array))

    @contextmanager
    def averaged(self) -> Generator[None]:
        """Exchange the weights and their moving averages (`train { ema = … }`) within this context.

        `forward` and all other readers of weights then use the averages. Frozen parameters are their own averages.
        Training continues after the context: a `step` within it would train the averages.

        Yields:
            Nothing.

        Raises:
            MbcError: MBC211 if the network keeps no averages.
        """
        check_averages(self._averages, self._plan.graph.name)
        with self._turns:
            self._exchange_averages()
            try:
                yield
            finally:
                self._exchange_averages()

    def state_dict(self, *, optimizer: bool = False, ema: bool = False) -> dict[str, Array]:
        """Return copies of parameters and statistics by name, in the order of the source.

        Arrays are in canonical layout and fp32 (fp64 if the network computes in fp64).

        Args:
            optimizer: Include the optimizer's state, with moving averages.
            ema: Return the moving averages in place of parameters and statistics.

        Raises:
            MbcError: MBC211 for `ema` if the network keeps no averages.
        """
        optimizer, ema = flag("optimizer", optimizer), flag("ema", ema)
        if ema:
            check_averages(self._averages, self._plan.graph.name)
        with self._turns:
            names = self._places.states if optimizer else self._weights
            return {name: self.state(self._averages.get(name, name) if ema else name) for name in names}

    def load_state_dict(self, arrays: Mapping[str, object]) -> None:
        """Overwrite parameters and statistics, and the optimizer's state if `arrays` has it.

        Moving averages start from the weights if `arrays` has no averages. Everything else stays, counters included.

        Args:
            arrays: The result of `state_dict` of this or any other plan of the network, or other floating-point arrays
                with these names and shapes.

        Raises:
            MbcError: MBC164 with every name that does not fit; then nothing has changed.
        """
        fitting = fit_weights(arrays, self.states, self._weights)
        with self._turns:
            self._overwrite(fitting, {})

    def save(self, path: str | Path, *, metadata: Mapping[str, str] | None = None, ema: bool = False) -> None:
        """Write parameters, statistics, optimizer state and counters as safetensors.

        Arrays are in canonical layout and fp32 (fp64 if the network computes in fp64), so that the file loads under any
        plan of the network. The file appears whole or not at all.

        Args:
            path: The file to write.
            metadata: Text for the file's header, which `load` ignores.
            ema: Write the moving averages alone, under the names of their weights, for `load(weights_only=True)`.

        Raises:
            MbcError: MBC162 if the file cannot be written, MBC211 for `ema` if the network keeps no averages.
        """
        place = path_of(path, "MBC162", "cannot write a checkpoint")
        averages = self.state_dict(ema=True) if flag("ema", ema) else None
        if self.rank:
            for name in self._places.wholes if averages is None else ():  # rank 0 writes them whole
                self.state(name)
            return
        described = {"format": "mbc", "network": self._plan.graph.name, "version": self._plan.version}
        with self._turns:
            if averages is not None:
                tensors = [*averages.items()]
            else:
                # First the sharded states, in the order in which the other ranks take part.
                gathered = {name: self.state(name) for name in self._places.wholes}
                tensors = [(name, gathered[name] if name in gathered else self.state(name)) for name in self.states]
                tensors += counter_tensors(self._read_control())
        write_checkpoint(place, tensors, {**texts(metadata), **described})

    def load(self, path: str | Path, *, strict: bool = True, weights_only: bool = False) -> None:
        """Read a file of `save`, written under this or any other plan of the network. Nothing changes if it fails.

        Args:
            path: The file to read.
            strict: Refuse a file that lacks states or has other names; False leaves missing states as they are and
                ignores other names.
            weights_only: Read all parameters and statistics, and leave the optimizer's state and the counters as they
                are, even if the file has them. This starts a training from weights; moving averages start from them,
                too.

        Raises:
            MbcError: MBC163 (not a complete file), MBC164 (every missing, unexpected and mismatched name) and MBC212
                (the file has no moving averages and the network keeps some, or the other way round).
        """
        place = path_of(path, "MBC163", "cannot read a checkpoint")
        strict = flag("strict", strict)
        weights_only = flag("weights_only", weights_only)
        if strict and not weights_only:
            check_averages_of(place, self._weights, self._averages)
        arrays, counters = read_weights(place, self.states, strict, self._weights if weights_only else None)
        if self._plan.graph.precision is not Precision.FP16:
            counters.pop("loss_scale", None)  # a counter of plans in fp16; others have no loss scale
        with self._turns:
            if strict and not weights_only:
                self._interrupted = False  # all states that a step could have changed in part are written now
            self._overwrite(arrays, counters)

    @property
    def _weights(self) -> tuple[str, ...]:
        """Names of parameters and statistics."""
        values, averages = self._plan.graph.values, self._averages.values()
        states = (name for name in self._places.states if name not in averages)
        return tuple(name for name in states if values[name].role is not Role.OPTIMIZER)

    def _own_part(self, place: Place, array: Array) -> Array:
        """Return this rank's part of a whole state, in the type in which it is computed."""
        array = array.astype(canonical_dtype(place.dtype))
        return part_from(array, place.shape[0], self.rank) if place.value in self._places.wholes else array

    def _exchange_averages(self) -> None:
        """Exchange the values of each weight and its moving average."""
        places = self._places.states
        with self._changing() as machine:
            for weight, average in self._averages.items():
                trained = machine.read(places[weight])
                machine.write(places[weight], machine.read(places[average]))
                machine.write(places[average], trained)

    def _overwrite(self, arrays: Mapping[str, Array], counters: Mapping[str, float]) -> None:
        with self._changing() as machine:
            for name, array in with_averages(arrays, self._averages).items():
                state = self._places.states[name]
                machine.write(state, self._own_part(state, array))
            self._write_control({**counters, "proceed": 1})


def _place_of(states: Mapping[str, Place], name: str) -> Place:
    """Return the place of state `name`.

    Raises:
        MbcError: MBC165 if there is no such state, with the most similar name.
    """
    if not isinstance(cast(object, name), str):
        raise MbcError("MBC165", f"there is no state {shown(name)}", "pass a state's name: see net.states")
    if name in states:
        return states[name]
    import difflib

    near = difflib.get_close_matches(name, states, 1)
    remedy = f"did you mean '{near[0]}'?" if near else "see net.states for the names"
    raise MbcError("MBC165", f"there is no state '{name}'", remedy)
