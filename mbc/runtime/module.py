"""The class that users work with: a compiled network that trains and predicts, on a GPU or on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, overload

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.averages import averages_of
from mbc.ir.control import HOST_BYTES, INITIAL_LOSS_SCALE
from mbc.ir.graph import Role
from mbc.ir.types import Precision
from mbc.ops.control_record import RECORD
from mbc.ops.shard import part_from
from mbc.plan.model import Plan
from mbc.runtime.arguments import flag, matched, path_of, plain_array, rate_of, texts
from mbc.runtime.arrays import DeviceArray, Wanted, check_rows, received, rows_of, wanted_inputs
from mbc.runtime.averaging import check_averages, with_averages
from mbc.runtime.bindings import Place, find_places
from mbc.runtime.checkpoint import write_checkpoint
from mbc.runtime.formats import canonical_dtype
from mbc.runtime.initial_states import initial
from mbc.runtime.launch_order import Transfers
from mbc.runtime.machine import Allocation, Figures, Machine, Memory, Observer, state_place
from mbc.runtime.membership import Membership, seed_of
from mbc.runtime.opening import Settings, open_machine, open_plan
from mbc.runtime.output import DeviceOutput
from mbc.runtime.reported_metrics import ACCURACY, judged_rows
from mbc.runtime.sliding_window import Windows, predict
from mbc.runtime.step_loss import Loss
from mbc.runtime.turns import Turns, refuse_copy
from mbc.runtime.weights import COUNTERS, check_averages_of, counter_tensors, fit_weights, read_weights

Array = NDArray[Any]
Output = Array | DeviceOutput


def report_closed(what: str, remedy: str) -> NoReturn:
    """Raise MBC230 for an object that is used after it was closed.

    Raises:
        MbcError: MBC230, with the remedy.
    """
    raise MbcError("MBC230", f"{what} is closed", remedy)


class Module:
    """A network as `mbc compile` wrote it. After construction nothing is allocated on the device.

    Calls of several threads run one after another. On a GPU a module works only in the thread and the process that
    opened it (MBC235); on the CPU a forked process has a module of its own. `copy.deepcopy` makes an independent module
    on the CPU; all other copies and pickles are refused (MBC234).

    A plan for several GPUs (`mbc compile --gpus`) needs one process for each GPU, started by mpirun, srun, torchrun or
    `mbc train --gpus`. Each process opens the module and calls the same methods in the same order, with its own rows.
    All start from equal parameters, `step` reports loss and metrics of the whole mini-batch, and `save` writes on rank
    0 alone.
    """

    def __init__(
        self,
        subject: str | Path | Plan,
        seed: int = 0,
        device: str = "auto",
        *,
        canaries: bool = False,
        eager: bool = False,
        prefetch: bool = True,
        shadow: bool = True,
        transfers: Transfers | str = Transfers.IN_ORDER,
        ranks: Membership | None = None,
        listener: int | None = None,
        allocate: Callable[[int], Allocation] | None = None,
        arena_of: Module | None = None,
    ) -> None:
        """Open the network and give all states their first values.

        Args:
            subject: The folder of a package, a plan file, or a `Plan`. A plan without a package runs on the CPU.
            seed: Seed of initial values, dropout and augmentation, from 0 to 2^63 - 1.
            device: `cuda`, `cpu` or `auto`. `auto` takes the GPU if there is one and the package was built for it;
                otherwise it warns and takes the CPU.
            canaries: On a GPU, surround the arena with a pattern for `check_canaries`.
            eager: On a GPU, run launch by launch, for memory checkers.
            prefetch: On a GPU, copy inputs in host memory while the step before runs, if the budget has room for these
                inputs a second time.
            shadow: On the CPU, check the owner of every byte.
            transfers: On the CPU, when copies run: `in_order`, `early` or `late`.
            ranks: The processes that share each mini-batch; None for those that the environment describes.
            listener: Address of a function that is called for each node of a GPU's graphs (`mbc/record/`).
            allocate: Returns device memory of so many bytes for the arena; None for CUDA's own allocator.
            arena_of: Another module on the device, in whose arena this one runs; the states keep their values.

        Raises:
            MbcError: MBC140 and MBC152 to MBC168 if the plan, the package or the machine does not allow it.
        """
        self._plan, folder, self._membership = open_plan(subject, ranks)
        settings = Settings(
            seed, device, canaries, eager, prefetch, shadow, transfers, self._membership, listener, allocate,
            None if arena_of is None else arena_of._opened_machine.arena,
        )  # fmt: skip
        self._places = find_places(self._plan)
        graph = self._plan.graph
        self._train_inputs = wanted_inputs(graph, graph.inputs)
        self._infer_inputs = wanted_inputs(graph, graph.infer_inputs)
        # Rows that are missing would count in statistics of the mini-batch (`bn(track=false)`).
        self.whole_batches = any("batch_statistics" in op.kind for op in graph.infer)
        self._judged = judged_rows(graph)
        self._averages = averages_of(graph)
        self._figures: Figures | None = None
        self._closed = False
        self._interrupted = False
        self._turns = Turns()
        self._opened_machine = open_machine(self._plan, self._places, folder, settings)
        averaged = {average: weight for weight, average in self._averages.items()}
        for state in graph.states:
            if state.value in self._places.states and arena_of is None:
                kind = graph.values[state.value].type
                place, drawn_as = self._places.states[state.value], averaged.get(state.value, state.value)
                self._machine.write(place, initial(drawn_as, kind, state.initializer, seed))
        scale = INITIAL_LOSS_SCALE if graph.precision is Precision.FP16 else 1.0
        self._write_control({"seed": seed, "proceed": 1, "loss_scale": scale, "gradient_scale": scale})

    def step(self, *inputs: object, lr: float, **named: object) -> Loss:
        """Train on one mini-batch, or on as many as `train { accumulate }` says.

        On a GPU the call returns while the step runs. An array in the GPU's memory must not be changed before the loss
        has been read.

        Args:
            *inputs: Inputs in the order of the source, with exactly `step_batch` rows: NumPy arrays, or anything with
                DLPack or `__cuda_array_interface__`.
            lr: The learning rate.
            **named: Inputs by name.

        Returns:
            The mean loss of the mini-batches before the update.

        Raises:
            MbcError: MBC145 to MBC151, MBC169, MBC230, MBC235 and MBC236.
        """
        rate = rate_of(lr)
        with self._turns:
            wanted, places = self._train_inputs, self._places.train_inputs
            arrays = self._received(wanted, inputs, named)
            ranks = self._plan.graph.ranks if self._plan.graph.optimizer.accumulate == 1 else None
            accumulate = self._plan.graph.optimizer.accumulate
            check_rows(wanted, arrays, self.step_batch, True, ranks, self.rank, accumulate)
            last = self.step_batch // self.batch - 1
            self._hand(self._machine, wanted, places, self._mini_batch(arrays, 0))
            with self._changing() as machine:
                for number in range(last):
                    machine.accumulate(self._next_control(rate, number), number)
                    self._hand(machine, wanted, places, self._mini_batch(arrays, number + 1))
                self._figures = machine.train(self._next_control(rate, last))
            return self._loss(self._figures)

    def _loss(self, figures: Figures) -> Loss:
        return Loss(figures, self._judged, self.step_batch // self.batch)

    def _mini_batch(self, arrays: Sequence[Array | DeviceArray], number: int) -> list[Array | DeviceArray]:
        """Return the rows of one mini-batch of a step."""
        rows = number * self.batch, (number + 1) * self.batch
        pairs = zip(self._train_inputs, arrays, strict=True)
        return [rows_of(array, *rows) if wanted.per_sample else array for wanted, array in pairs]

    def _next_control(self, rate: float, number: int) -> bytes:
        """Return the host's part of the control block for mini-batch `number` of a step."""
        self._steps += 1
        return self._control_of(self._steps, rate, number)

    def _control_of(self, step: int, rate: float, number: int) -> bytes:
        """Return the host's part of the control block for mini-batch `number`, which is the `step`-th of the module."""
        control = np.zeros((), RECORD)
        control["step"], control["learning_rate"] = step, rate
        control["seed"] = seed_of(self._seed, self.rank)
        control["training"], control["accumulated"] = 1, number
        return control.tobytes()[:HOST_BYTES]

    @overload
    def forward(self, *inputs: object, copy: Literal[True] = True, **named: object) -> Array | tuple[Array, ...]: ...

    @overload
    def forward(self, *inputs: object, copy: bool, **named: object) -> Output | tuple[Output, ...]: ...

    def forward(self, *inputs: object, copy: bool = True, **named: object) -> Output | tuple[Output, ...]:
        """Return the outputs for 1 to `batch` rows, with running statistics and without dropout.

        A network with `bn(track=false)` needs `batch` rows, whose statistics it uses.

        Args:
            *inputs: The inputs on which outputs depend, in the order of the source.
            copy: Return NumPy arrays. False returns on a GPU a `DeviceOutput` (DLPack, `__cuda_array_interface__`)
                without waiting for the program: the memory to which the program writes, in the working precision,
                valid until the next `step` or `forward`. On the CPU False returns an array that cannot be written to.
            **named: Inputs by name.

        Returns:
            The output, or a tuple of several outputs in the order of the source.

        Raises:
            MbcError: MBC146 to MBC151, MBC167, MBC230, MBC235 and MBC236.
        """
        graph = self._plan.graph
        copy = flag("copy", copy)
        with self._turns:
            arrays = self._received(self._infer_inputs, inputs, named)
            rows = check_rows(self._infer_inputs, arrays, self.batch, exact=self.whole_batches)
            self._hand(self._machine, self._infer_inputs, self._places.infer_inputs, arrays)
            self._machine.infer()
            outputs: list[Output] = []
            for name, value in zip(graph.outputs, graph.infer_outputs, strict=True):
                place = self._places.infer_outputs[name]
                count = rows if graph.values[value].per_sample else place.shape[0]
                outputs.append(self._machine.read(place)[:count] if copy else self._machine.output(place, count))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def predict(self, images: Array, windows: Windows | None = None) -> Array:
        """Return the output for images of any size, predicted in windows of the network's input that overlap.

        Class numbers are `argmax(axis=1)` of the result. It is computed in fp32 and takes, beside itself, one number
        for each position.

        Args:
            images: [rows, channels, *size], which may be a memory map. Images smaller than the input are padded with
                zeros on both sides.
            windows: Overlap, weights, mirroring and average; None for the usual ones.

        Returns:
            [rows, channels of the output, *size]: probabilities if a loss makes them of logits. [rows, channels] if the
            output has no positions; the images then have the size of the input.

        Raises:
            MbcError: MBC380 and MBC381, and those of `forward`.
        """
        return predict(self._plan.graph, self.batch, self.forward, images, windows or Windows())

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last step by name; empty before the first step, and if nothing is classified or measured.

        `accuracy` is the share of the step's rows (positions, in segmentation) that were classified correctly, from 0
        to 1. If several losses classify, `accuracy` belongs to the first in the source, `accuracy_2` to the second, and
        so on. Metrics of the source have their own names.
        """
        return {} if self._figures is None else self._loss(self._figures).metrics

    @property
    def correct(self) -> float | None:
        """Number of rows (positions, in segmentation) of the last step that were classified correctly.

        It is None if nothing is classified. If several losses classify, it belongs to the first in the source.
        """
        return None if self._figures is None or ACCURACY not in self._judged else self._figures.values[1]

    @property
    def accuracy(self) -> float | None:
        """`correct` as a share of all rows. The accuracy of an earlier step is in the loss that the step returned."""
        return self.metrics.get(ACCURACY)

    def wait(self) -> None:
        """Wait until the GPU has done all work that was queued."""
        with self._turns:
            self._machine.wait()

    @property
    def plan(self) -> Plan:
        """The plan that the module runs."""
        return self._plan

    @property
    def places(self) -> Mapping[str, Place]:
        """The place of each state in the plan's memory."""
        return self._places.states

    def shared(self, place: Place) -> Any:
        """Return an object with DLPack over the memory of a place of this module."""
        return self._machine.shared(place)

    @property
    def device(self) -> str:
        """The kind of device: `cuda` or `cpu`."""
        return self._opened_machine.device

    @property
    def memory(self) -> Memory:
        """Bytes planned and taken."""
        return self._opened_machine.memory

    @property
    def batch(self) -> int:
        """Rows of this rank in a mini-batch: the limit of a forward pass, and of a step that does not accumulate."""
        return self._plan.graph.batch

    @property
    def step_batch(self) -> int:
        """Rows of this rank in a step: in all mini-batches whose gradients the step accumulates."""
        return self._plan.graph.step_batch

    @property
    def rank(self) -> int:
        """Number of this process among those that share a mini-batch; 0 if there is only one."""
        return 0 if self._membership is None else self._membership.rank

    @property
    def ranks(self) -> int:
        """Number of processes that share a mini-batch."""
        return 1 if self._membership is None else self._membership.size

    @property
    def control(self) -> dict[str, int | float]:
        """Counters of the control block: steps, updates, skipped steps, loss scale, seed."""
        with self._turns:
            record = self._read_control()
        return {name: record[name].item() for name in COUNTERS}

    def set_control(self, **counters: float) -> None:
        """Overwrite counters of the control block, such as `updates` or `loss_scale`; all others stay.

        Raises:
            MbcError: MBC165 for another name, or a number out of the counter's range.
        """
        for name, number in counters.items():
            if name not in COUNTERS or not COUNTERS[name].allows(number):
                remedy = f"pass one of {', '.join(COUNTERS)} within its range"
                raise MbcError("MBC165", f"the control block takes no '{name}' of {number:g}", remedy)
        with self._turns, self._changing():
            self._write_control(counters)

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
        place = state_place(self._places.states, name)
        with self._turns:
            whole = self._places.wholes.get(name)
            return self._machine.read(place) if whole is None else self._machine.gathered(place, whole)

    def set_state(self, name: str, array: Array) -> None:
        """Overwrite a state with an array of its shape in canonical layout.

        Raises:
            MbcError: MBC165 if there is no state of that name, or if shape or type do not fit.
        """
        place = state_place(self._places.states, name)
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

    def observe(self, observer: Observer | None) -> None:
        """Run programs launch by launch, wait for each launch, and call `observer` before and after it; None ends this.

        It is slow, and serves to check the launches of a plan one by one.
        """
        with self._turns:
            self._machine.observe(observer)

    def check_canaries(self) -> None:
        """Raise MBC161 if a byte beside the arena was written; it needs `canaries=True` and a GPU."""
        with self._turns:
            check = getattr(self._machine, "check_canaries", None)
            if check is not None:
                check()

    def close(self) -> None:
        """Give device memory back now instead of when Python ends; afterwards nothing can be run or read."""
        with self._turns:
            self._opened_machine.close()
            self._closed = True

    def __enter__(self) -> Self:
        """Return the module, which the context closes at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the module."""
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        """Return another module in the same state, with an arena of its own; on the CPU only (MBC234)."""
        with self._turns:
            other = object.__new__(type(self))
            vars(other).update(vars(self), _turns=Turns(), _opened_machine=self._machine.twin())
        memo[id(self)] = other
        return other

    def __copy__(self) -> NoReturn:
        """Raise MBC234: two modules cannot share one arena."""
        refuse_copy("a module", "two modules cannot share one arena: on the CPU use copy.deepcopy, on a GPU save a "
                    "checkpoint and load it into another Module")  # fmt: skip

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Raise MBC234: a module cannot be pickled."""
        refuse_copy("a module", "save a checkpoint, open a Module where it is needed, and load the checkpoint there")

    def __repr__(self) -> str:
        """Return the network's name, inputs, outputs, memory and predicted time of a step, in several lines."""
        graph, predicted = self._plan.graph, self._plan.predictions
        values = graph.values
        trained = sum(value.type.elements for value in values.values() if value.role is Role.PARAMETER)
        described = [f"  input {name}: {values[name].type}" for name in graph.inputs]
        described += [f"  output {name}: {values[name].type}" for name in graph.outputs]
        return "\n".join(
            (
                f"{graph.name}: {trained:,} parameters, batch {graph.batch}, {graph.precision}, on {self.device}",
                *described,
                f"  {self.memory}",
                f"  step predicted {predicted.train_us / 1e3:,.3f} ms on {self._plan.target.gpu},"
                f" {self._steps // graph.optimizer.accumulate} done",
            )
        )

    @property
    def _machine(self) -> Machine:
        """The machine that runs the programs.

        Raises:
            MbcError: MBC230 after `close`, MBC235 in a process or thread in which the machine cannot be used, and
                MBC236 after a call was interrupted that had changed some of the states.
        """
        if self._closed:
            report_closed("the module", "open another one: Module(...)")
        self._opened_machine.check_home()
        if self._interrupted:
            raise MbcError(
                "MBC236",
                "a call that changes states was interrupted: some states have changed, others have not",
                "load a checkpoint, or open another module",
            )
        return self._opened_machine

    @contextmanager
    def _changing(self) -> Generator[Machine]:
        """Yield the machine to a body that changes states, which are consistent again only after the body's end."""
        machine = self._machine
        self._interrupted = True
        yield machine
        self._interrupted = False

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
            self._figures = None

    def _received(
        self, wanted: Sequence[Wanted], inputs: tuple[object, ...], named: dict[str, object]
    ) -> list[Array | DeviceArray]:
        """Return all inputs, checked except for their number of rows."""
        given = matched([w.name for w in wanted], inputs, named)
        return [received(w, given[w.name], self._machine.stream) for w in wanted]

    @staticmethod
    def _hand(
        machine: Machine, wanted: Sequence[Wanted], places: Mapping[str, Place], arrays: Sequence[Array | DeviceArray]
    ) -> None:
        for w, array in zip(wanted, arrays, strict=True):
            machine.feed(places[w.name], array)

    def _read_control(self) -> Array:
        record = self._machine.read(self._places.control).view(RECORD).reshape(())
        record["seed"] = self._seed  # the control block holds the rank's own seed
        return record

    def _write_control(self, fields: Mapping[str, float]) -> None:
        """Set some fields of the control block; all other fields stay, or are zero before the first step."""
        machine = self._opened_machine
        is_written = hasattr(self, "_steps")
        record = machine.read(self._places.control).view(RECORD).reshape(()) if is_written else np.zeros((), RECORD)
        for name, number in fields.items():
            record[name] = number
        if "seed" in fields:
            self._seed = int(fields["seed"])
        ranks = self._plan.graph.ranks
        record["global_seed"] = self._seed
        record["first_row"] = 0 if ranks is None else ranks.first_row(self.rank)
        record["rank"] = self.rank
        machine.write(self._places.control, np.frombuffer(record.tobytes(), np.uint8))
        self._steps: int = int(record["step"])
