"""A plan that is open on a machine: access by one thread at a time, its control block, its sizes, and its end.

Training, prediction and checkpoints build on it: each needs a machine that is open and consistent.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.averages import averages_of
from mbc.ir.control import HOST_BYTES, INITIAL_LOSS_SCALE
from mbc.ir.graph import Role
from mbc.ir.types import Precision
from mbc.ops.control_record import RECORD
from mbc.plan.model import Plan
from mbc.runtime.bindings import Place, find_places
from mbc.runtime.initial_states import initial
from mbc.runtime.machine import Machine, Memory, Observer
from mbc.runtime.membership import seed_of
from mbc.runtime.opening import Settings, open_machine
from mbc.runtime.turns import Turns, refuse_copy
from mbc.runtime.weights import COUNTERS

Array = NDArray[Any]


def report_closed(what: str, remedy: str) -> NoReturn:
    """Raise MBC230 for an object that is used after it was closed.

    Raises:
        MbcError: MBC230, with the remedy.
    """
    raise MbcError("MBC230", f"{what} is closed", remedy)


class OpenedPlan:
    """A plan with a machine of its own, which calls use one after another."""

    def __init__(self, plan: Plan, folder: Path | None, settings: Settings) -> None:
        """Open the machine, and give all states their first values unless it runs in another module's arena.

        Raises:
            MbcError: The errors of `open_machine`.
        """
        self._plan, self._membership = plan, settings.membership
        self._places, graph = find_places(plan), plan.graph
        self._averages = averages_of(graph)
        self._closed = False
        self._interrupted = False
        self._turns = Turns()
        self._opened_machine = open_machine(plan, self._places, folder, settings)
        averaged = {average: weight for weight, average in self._averages.items()}
        for state in graph.states:
            if state.value in self._places.states and settings.arena is None:
                kind = graph.values[state.value].type
                place, drawn_as = self._places.states[state.value], averaged.get(state.value, state.value)
                self._machine.write(place, initial(drawn_as, kind, state.initializer, settings.seed))
        scale = INITIAL_LOSS_SCALE if graph.precision is Precision.FP16 else 1.0
        self._write_control({"seed": settings.seed, "proceed": 1, "loss_scale": scale, "gradient_scale": scale})

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
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
        step = f"predicted {predicted.train_us / 1e3:,.3f} ms on {self._plan.target.gpu}"
        step = step if self._plan.is_timed else "for the CPU"
        return "\n".join(
            (
                f"{graph.name}: {trained:,} parameters, batch {graph.batch}, {graph.precision}, on {self.device}",
                *described,
                f"  {self.memory}",
                f"  step {step}, {self._steps // graph.optimizer.accumulate} done",
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
