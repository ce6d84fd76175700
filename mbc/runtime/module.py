"""What a user touches: a compiled network that trains and predicts, on a GPU or on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.control import HOST_BYTES, INITIAL_LOSS_SCALE
from mbc.ir.graph import Role, TrainingGraph
from mbc.ir.types import Precision
from mbc.ops.control import RECORD
from mbc.plan.file import PLAN_FILE, load_plan
from mbc.plan.model import Plan
from mbc.runtime.arrays import DeviceArray, Wanted, check_rows, classes_of, received
from mbc.runtime.checkpoint import Checkpoint, write_checkpoint
from mbc.runtime.formats import canonical_dtype
from mbc.runtime.initial import initial
from mbc.runtime.loss import Loss
from mbc.runtime.machine import Figures, Host, Machine, Memory, Observer, state_place
from mbc.runtime.output import DeviceOutput
from mbc.runtime.places import Place, find_places
from mbc.runtime.transfers import Transfers

Array = NDArray[Any]
Output = Array | DeviceOutput

DEVICES = ("auto", "cuda", "cpu")

# Reasons for which `device="auto"` takes the CPU: no PyCUDA, no GPU, no library built, a precision no GPU runs.
_NO_CUDA = frozenset(("MBC152", "MBC153", "MBC157", "MBC168"))

# Counters of the control block that a checkpoint keeps, and their types there.
_COUNTERS = {
    "step": np.int64, "seed": np.int64, "updates": np.int64, "skipped": np.int64, "since_growth": np.int64,
    "loss_scale": np.float32,
}  # fmt: skip


class Module:
    """A network as `mbc compile` wrote it. After construction nothing is allocated on the device.

    `subject`: the folder of a package, a plan file, or a `Plan` (these two run on the CPU). `device`: `auto` takes the
    GPU where there is one and the package was built, else the CPU, and says so. On a GPU, `canaries` surrounds the
    arena with a pattern that `check_canaries` looks at, and `eager` runs launch by launch, for memory checkers;
    `prefetch` lets inputs in host memory travel while the step before runs, where the budget has room for them once
    more. On the CPU, `shadow` watches the owner of every byte and `transfers` says when copies run.

    Raises MBC140 and MBC152 to MBC168 where the plan, the package or the machine does not allow it.
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
    ) -> None:
        if device not in DEVICES:
            raise MbcError("MBC167", f"unknown device '{device}'", f"choose one of {', '.join(DEVICES)}")
        if not isinstance(cast(object, seed), int | np.integer):
            raise MbcError("MBC167", f"the seed {seed!r} is no whole number", "choose one from 0 to 2^63 - 1")
        if not 0 <= seed < 1 << 63:
            raise MbcError("MBC167", f"the seed {seed} is not in [0, 2^63)", "choose another one")
        self._plan, folder = _opened(subject)
        self._places = find_places(self._plan)
        graph = self._plan.graph
        self._train_inputs = tuple(self._wanted(name) for name in graph.inputs)
        self._infer_inputs = tuple(self._wanted(name) for name in graph.infer_inputs)
        self._figures: Figures | None = None
        self._loss: Loss | None = None
        self._judged = _judged(graph)
        self._closed = False
        self._opened_machine = self._open(folder, device, canaries, eager, prefetch, shadow, Transfers(transfers))
        for state in graph.states:
            if state.value in self._places.states:
                kind = graph.values[state.value].type
                place = self._places.states[state.value]
                self._machine.write(place, initial(state.value, kind, state.initializer, seed))
        scale = INITIAL_LOSS_SCALE if graph.precision is Precision.FP16 else 1.0
        self._write_control({"seed": seed, "proceed": 1, "loss_scale": scale, "gradient_scale": scale})

    def step(self, *inputs: object, lr: float, **named: object) -> Loss:
        """Train on one mini-batch with the learning rate `lr`; returns the loss before the update.

        Inputs come in the order of the source, or by name: NumPy arrays, or anything with DLPack or
        `__cuda_array_interface__`, with exactly `batch` rows. On a GPU the call returns while the step runs, and an
        array in its memory must not be changed before the loss was looked at. Raises MBC145 to MBC151, MBC169, MBC230.
        """
        if not _is_rate(lr):
            raise MbcError("MBC169", f"the learning rate is {lr!r}", "pass a finite number of at least 0")
        self._feed(self._train_inputs, self._places.train_inputs, inputs, named, exact=True)
        self._steps += 1
        control = np.zeros((), RECORD)
        control["step"], control["seed"], control["learning_rate"] = self._steps, self._seed, lr
        control["training"] = 1
        self._figures = self._machine.train(control.tobytes()[:HOST_BYTES])
        self._loss = Loss(self._figures, self._judged)
        return self._loss

    @overload
    def forward(self, *inputs: object, copy: Literal[True] = True, **named: object) -> Array | tuple[Array, ...]: ...

    @overload
    def forward(self, *inputs: object, copy: bool, **named: object) -> Output | tuple[Output, ...]: ...

    def forward(self, *inputs: object, copy: bool = True, **named: object) -> Output | tuple[Output, ...]:
        """Outputs for 1 to `batch` rows, with running statistics and without dropout, as NumPy arrays.

        Takes only the inputs that outputs depend on. Several outputs come as a tuple, in the order of the source.
        `copy=False` leaves them where the program wrote them, in the working precision, until the next `step` or
        `forward`: on a GPU as a `DeviceOutput` (DLPack, `__cuda_array_interface__`), for which this call does not
        wait; on the CPU as a NumPy array of the arena that cannot be written to (half precision still copies).
        """
        graph = self._plan.graph
        rows = self._feed(self._infer_inputs, self._places.infer_inputs, inputs, named, exact=False)
        self._machine.infer()
        outputs: list[Output] = []
        for name, value in zip(graph.outputs, graph.infer_outputs, strict=True):
            place = self._places.infer_outputs[name]
            count = rows if graph.values[value].per_sample else place.shape[0]
            outputs.append(self._machine.read(place)[:count] if copy else self._machine.output(place, count))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @property
    def metrics(self) -> dict[str, float]:
        """The scalars that the last step reported beside its loss; empty before the first."""
        if self._figures is None:
            return {}
        return dict(zip(self._plan.graph.metrics, self._figures.values[1:], strict=True))

    @property
    def correct(self) -> float | None:
        """How many rows (positions, in segmentation) of the last step were classified correctly; None where nothing
        is classified. With several losses, the first that classifies."""
        return next(iter(self.metrics.values()), None)

    @property
    def accuracy(self) -> float | None:
        """`correct` as a share; that of an earlier step is in the loss that it returned."""
        return None if self._loss is None else self._loss.accuracy

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return self._opened_machine.device

    @property
    def memory(self) -> Memory:
        """Bytes planned and taken."""
        return self._opened_machine.memory

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self._plan.graph.batch

    @property
    def control(self) -> dict[str, int | float]:
        """Counters of the control block: steps, updates, skipped steps, loss scale, seed."""
        record = self._read_control()
        return {name: record[name].item() for name in _COUNTERS}

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of parameters, statistics and optimizer state, in the order of the source."""
        return {name: place.shape for name, place in self._places.states.items()}

    def state(self, name: str) -> Array:
        """A copy of a state in canonical layout; MBC165 when there is none of that name."""
        return self._machine.read(state_place(self._places.states, name))

    def set_state(self, name: str, array: Array) -> None:
        """Overwrite a state with an array of its shape in canonical layout; MBC165."""
        place = state_place(self._places.states, name)
        array = np.asarray(array)
        if array.shape != place.shape or array.dtype.kind not in "fiu":
            got = f"{array.dtype} {list(array.shape)}"
            raise MbcError("MBC165", f"state '{name}' has the shape {list(place.shape)}, got {got}", "pass it so")
        self._machine.write(place, array.astype(canonical_dtype(place.dtype)))

    def save(self, path: str | Path, *, metadata: Mapping[str, str] | None = None) -> None:
        """Write parameters, statistics, optimizer state and counters as safetensors; MBC162 when that fails.

        Arrays are in canonical layout and fp32 (fp64 where the network is computed in it), so that the file loads
        under any plan of the network. `metadata` goes into the file's header; `load` passes over it. The file appears
        whole or not at all.
        """
        control = self._read_control()
        tensors = [(name, self.state(name)) for name in self._places.states]
        tensors += [(f"control.{name}", control[name].astype(kind).reshape(1)) for name, kind in _COUNTERS.items()]
        described = {"format": "mbc", "network": self._plan.graph.name, "version": self._plan.version}
        write_checkpoint(Path(path), tensors, {**(metadata or {}), **described})

    def load(self, path: str | Path, *, strict: bool = True) -> None:
        """Read what `save` wrote, under this or any other plan of the network. Nothing changes when it fails.

        `strict=False` leaves states that the file lacks as they are and passes over names it has too many.
        Raises MBC163 (not a whole file) and MBC164 (every missing, unexpected and mismatched name).
        """
        checkpoint = Checkpoint(Path(path))
        expected = {**self.states, **{f"control.{name}": (1,) for name in _COUNTERS}}
        found = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        _compare(str(path), expected, found, strict)
        for name, place in self._places.states.items():
            if name in found:
                self._machine.write(place, checkpoint.read(name).astype(canonical_dtype(place.dtype)))
        counters = {name: checkpoint.read(f"control.{name}")[0] for name in _COUNTERS if f"control.{name}" in found}
        if self._plan.graph.precision is not Precision.FP16:
            counters.pop("loss_scale", None)  # of a plan in fp16; others have no scale
        self._write_control(counters)
        self._figures = self._loss = None

    def observe(self, observer: Observer | None) -> None:
        """Run programs launch by launch, each waited for, and call `observer` before and after each; None: no longer.
        Slow: it is how the launches of a plan are checked one by one."""
        self._machine.observe(observer)

    def check_canaries(self) -> None:
        """MBC161 when something was written beside the arena; needs `canaries=True` and a GPU."""
        check = getattr(self._machine, "check_canaries", None)
        if check is not None:
            check()

    def close(self) -> None:
        """Give device memory back now rather than when Python ends; nothing can be run or read afterwards."""
        self._closed = True
        self._opened_machine.close()

    def __enter__(self) -> Module:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
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
                f"  step predicted {predicted.train_us / 1e3:,.3f} ms on {self._plan.target.gpu}, {self._steps} done",
            )
        )

    @property
    def _machine(self) -> Machine:
        """What runs the programs: MBC230 once it has given everything back."""
        if self._closed:
            raise MbcError("MBC230", "the module is closed", "open another one: Module(...)")
        return self._opened_machine

    def _open(
        self,
        folder: Path | None,
        device: str,
        canaries: bool,
        eager: bool,
        prefetch: bool,
        shadow: bool,
        transfers: Transfers,
    ) -> Machine:
        if device != "cpu":
            from mbc.runtime.cuda import open_cuda

            try:
                return open_cuda(self._plan, self._places, folder, canaries=canaries, eager=eager, prefetch=prefetch)
            except MbcError as error:
                if device == "cuda" or error.code not in _NO_CUDA:
                    raise
                warnings.warn(f"running on the CPU: {error.message}", RuntimeWarning, stacklevel=4)
        return Host(self._plan, self._places, shadow=shadow, transfers=transfers)

    def _wanted(self, name: str) -> Wanted:
        value = self._plan.graph.values[name]
        return Wanted(name, value.type, value.per_sample, classes_of(self._plan.graph, name))

    def _feed(
        self,
        wanted: Sequence[Wanted],
        places: Mapping[str, Place],
        inputs: tuple[object, ...],
        named: dict[str, object],
        exact: bool,
    ) -> int:
        """Check all inputs, then hand them to the machine; the number of rows."""
        given = _matched([w.name for w in wanted], inputs, named)
        arrays: list[Array | DeviceArray] = [received(w, given[w.name], self._machine.stream) for w in wanted]
        rows = check_rows(wanted, arrays, self.batch, exact)
        for w, array in zip(wanted, arrays, strict=True):
            self._machine.feed(places[w.name], array)
        return rows

    def _read_control(self) -> Array:
        return self._machine.read(self._places.control).view(RECORD).reshape(())

    def _write_control(self, fields: Mapping[str, float]) -> None:
        """Set some fields of the control block; the rest stays, or is zero before the first step."""
        record = self._read_control() if hasattr(self, "_steps") else np.zeros((), RECORD)
        for name, number in fields.items():
            record[name] = number
        self._machine.write(self._places.control, np.frombuffer(record.tobytes(), np.uint8))
        self._steps, self._seed = int(record["step"]), int(record["seed"])


def _judged(graph: TrainingGraph) -> int | None:
    """How many rows or positions the first metric counts."""
    if not graph.metrics:
        return None
    operation = next(o for o in graph.train if graph.metrics[0] in o.outputs)
    return graph.values[operation.inputs[1]].type.elements


def _is_rate(given: object) -> bool:
    try:
        return bool(np.ndim(cast(Any, given)) == 0 and 0 <= cast(Any, given) < np.inf)
    except TypeError:
        return False


def _opened(subject: str | Path | Plan) -> tuple[Plan, Path | None]:
    """The plan, and the folder that its library lies in."""
    if isinstance(subject, Plan):
        return subject, None
    path = Path(subject)
    file = path / PLAN_FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MbcError(
            "MBC166", f"cannot read the plan '{file}': {error}", "give the folder that `mbc compile` wrote"
        ) from error
    return load_plan(text, str(file)), file.parent


def _matched(names: list[str], inputs: tuple[object, ...], named: dict[str, object]) -> dict[str, object]:
    """Inputs by name; MBC167 unless every name has one."""
    given = dict(zip(names, inputs, strict=False))
    twice = [name for name in named if name in given]
    given.update(named)
    unknown = [name for name in named if name not in names]
    missing = [name for name in names if name not in given]
    if len(inputs) <= len(names) and not (twice or unknown or missing):
        return given
    problems = [f"{len(inputs)} were passed by position"] if len(inputs) > len(names) else []
    for label, those in (("missing", missing), ("unknown", unknown), ("passed twice", twice)):
        if those:
            problems.append(f"{label}: {', '.join(those)}")
    raise MbcError("MBC167", f"the inputs are ({', '.join(names)}); {'; '.join(problems)}", "pass each of them once")


def _compare(
    path: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], strict: bool
) -> None:
    """MBC164 with every missing, unexpected and mismatched name."""
    lines: list[str] = []
    if strict:
        lines += [f"missing     {name} {list(shape)}" for name, shape in expected.items() if name not in found]
        lines += [f"unexpected  {name} {list(shape)}" for name, shape in found.items() if name not in expected]
    lines += [
        f"mismatched  {name}: the network has {list(shape)}, the file {list(found[name])}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if lines:
        listed = "\n  ".join(lines)
        raise MbcError(
            "MBC164",
            f"'{path}' does not fit the network ({len(lines)} names):\n  {listed}",
            "load it into the network that it was saved from",
        )
