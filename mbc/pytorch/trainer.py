"""A PyTorch model that mbc trains: planned from an example, stepped in the user's loop, on PyTorch's own tensors."""

from __future__ import annotations

import importlib
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from mbc.errors import MbcError
from mbc.hardware.target import current_gpu
from mbc.interchange.importing import check_source
from mbc.interchange.write import write_source
from mbc.ir.types import Precision
from mbc.options import Options
from mbc.progress import busy
from mbc.pytorch.check_model import Subject, check_model
from mbc.pytorch.compiled_model import (
    TorchMemory,
    evaluated,
    memory_text,
    open_compiled,
    ordered,
    precision_name,
    silent,
)
from mbc.pytorch.exported_model import Exported, export_model, network_of, refuse_model
from mbc.pytorch.model_changes import ModelChanges, autocast_reason
from mbc.pytorch.model_tensors import example_tensors, readable
from mbc.pytorch.objective import fitted, judges_of, loss_modules, losses_of
from mbc.pytorch.optimizer_states import OptimizerStates
from mbc.pytorch.process_memory import free_unused
from mbc.pytorch.shared_states import SharedStates
from mbc.pytorch.targets import Target, explain
from mbc.pytorch.torch_optimizer import Updates, check_parameters, entries_of, rate_now, settings_of_updates, updates_of
from mbc.runtime.arguments import duration_of
from mbc.runtime.driver import report_no_gpu
from mbc.runtime.module import Module, report_closed
from mbc.runtime.step_loss import Loss
from mbc.source import Source
from mbc.stages import Stages

torch: Any = importlib.import_module("torch")
_UNDO = "undo it (p.copy_ changes numbers in place), or close the trainer and make another one: mbc.from_torch(...)"
_trainers: weakref.WeakKeyDictionary[Any, weakref.ref[Trainer]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds that `from_torch` took.

    Attributes:
        all_s: The whole time.
        importing_s: The export, the import and its check.
        planning_s: The planning.
        measuring_s: The measurements for the plan.
        building_s: The build of the package.
    """

    all_s: float
    importing_s: float
    planning_s: float
    measuring_s: float
    building_s: float


class Trainer:
    """Trains a model in place of PyTorch; `mbc.from_torch` creates it.

    Parameters and statistics are the model's own tensors in the plan's memory: each reader sees the trained numbers,
    and each change counts. A model on another device is on the plan's until the trainer is closed; with
    `precision="fp64"` it is in float64. A trainer is a context manager. At the end of its block, in `close`, and when
    the trainer is deleted, the model gets memory of its own, and the plan's is freed.

    Attributes:
        source: The network in mbc's language.
        took: The seconds that its creation took.
        module: The compiled network.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        exported: Exported,
        source: str,
        module: Module,
        updates: Updates,
        targets: Sequence[Target],
        losses: Sequence[Any],
        took: Took,
    ) -> None:
        """Take over a model and its optimizer, for a network that was compiled from them."""
        self.source = source
        self.took = took
        self.module = module
        self._optimizer, self._updates = optimizer, updates
        self._model, self._keys = model, exported.network.keys
        self._used = exported.used
        self._inputs = exported.inputs
        self._targets = targets
        kept, dtype = next(model.parameters()), torch.float64 if module.plan.graph.precision is Precision.FP64 else None
        move_back = partial(model.to, kept.device, None if dtype is None else kept.dtype)
        model.to(module.device, dtype)
        self._states = SharedStates(model, exported.network, module, {})
        self._states.count_on_host()
        free_unused()  # the tensors' earlier memory
        self._in_flight: tuple[Loss, list[Any]] | None = None
        self._optimizer_states = OptimizerStates(optimizer, module, self._states)
        self._close = weakref.finalize(
            self,
            _release,
            move_back,
            module,
            self._states,
            self._optimizer_states,
            (
                optimizer.register_step_pre_hook(_refuse_step),
                optimizer.register_state_dict_pre_hook(self._optimizer_states.count),
            ),
        )
        self._changes = ModelChanges(model, True, losses, optimizer)
        _trainers[model] = weakref.ref(self)
        try:
            self._optimizer_states.refresh()
        except MbcError:
            self.close()
            raise

    def step(self, *inputs: Any, lr: float | None = None) -> Loss:
        """Return the loss of one update from inputs and targets.

        Args:
            *inputs: Inputs and targets in the order of the source, on the CPU or on the GPU that the trainer runs on.
            lr: The learning rate of the first parameter group. None takes the current rate of the optimizer's groups,
                so that PyTorch's schedulers work.

        Raises:
            MbcError: MBC230 (a closed trainer), MBC335 (rates or hyperparameters that the plan does not allow), MBC336
                (another number of samples), MBC338 (a changed model), and the errors of `Module.step`.
        """
        self._check_open()
        rate = rate_now(self._updates, self._optimizer, lr)
        rows = inputs[0].shape[0] if inputs and getattr(inputs[0], "ndim", 0) else self.module.step_batch
        if rows != self.module.step_batch:
            raise MbcError(
                "MBC336",
                f"a batch has {rows} samples, but a step of this trainer takes {self.module.step_batch}",
                "let the DataLoader drop the last batch (drop_last=True), or make a trainer with such an example",
            )
        given = self._read(inputs)
        autocast = autocast_reason(str(self.module.plan.graph.precision))
        self._follow(self._changes.reason(self._model.training) or autocast or self._states.refresh())
        self._optimizer_states.refresh()
        try:
            with ordered(self.module.device):
                loss = self.module.step(*given, lr=rate)
        except MbcError as error:
            explained = explain(self._targets, inputs[self._inputs :], error)
            raise explained from error
        for _ in range(self.module.step_batch // self.module.batch):
            self._states.count()
        self._optimizer._opt_called = True  # schedulers read this flag to warn of a wrong order of calls
        # PyTorch may reuse the memory of a tensor on the GPU once no reference is left: one is kept until the step
        # has read the tensor.
        before, on_gpu = self._in_flight, [tensor for tensor in given if getattr(tensor, "is_cuda", False)]
        self._in_flight = (loss, on_gpu) if on_gpu else None
        if before is not None:
            before[0].item()
        return loss

    def evaluate(self, *inputs: Any, copy: bool = True) -> Any:
        """Return the outputs for 1 to `batch` samples, with running statistics and without dropout.

        Args:
            *inputs: The inputs of the model.
            copy: Whether the outputs are tensors in float32, on the device of the first input. False returns on a GPU
                tensors over mbc's memory, in the precision of the trainer and valid until the next step or evaluation.
        """
        self._check_open()
        self._follow(self._states.refresh())
        tensors = evaluated(self.module, self._read(inputs), copy)
        if copy:
            device = getattr(inputs[0], "device", "cpu")
            tensors = [tensor.to(device) for tensor in tensors]
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    def averages(self) -> dict[str, Any]:
        """Return the model's `state_dict` with the moving averages of its weights, which `ema` keeps.

        Raises:
            MbcError: MBC230 (a closed trainer), MBC211 (a trainer without averages).
        """
        self._check_open()
        arrays = self.module.state_dict(ema=True)
        averaged = {k.name: torch.from_numpy(arrays[k.state]).reshape(k.shape) for k in self._keys if k.state}
        return {**self._model.state_dict(), **averaged}

    def _read(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the tensors that the network reads, without inputs that the model does not use."""
        if not self._inputs <= len(inputs) <= self._inputs + len(self._targets):
            return list(inputs)  # the step raises an error that names what is missing
        targets = zip(self._targets, inputs[self._inputs :], strict=False)
        return [*(readable(inputs[n]) for n in self._used), *(target.read(given) for target, given in targets)]

    def _check_open(self) -> None:
        """Raise MBC230 if the trainer was closed.

        Raises:
            MbcError: MBC230.
        """
        if not self.open:
            report_closed("the trainer", "make another one: mbc.from_torch(model, ...)")

    @property
    def open(self) -> bool:
        """True until the trainer is closed."""
        return self._close.alive

    @staticmethod
    def _follow(change: str) -> None:
        """Raise MBC338 for a change that the plan cannot follow, if there is one.

        Raises:
            MbcError: MBC338.
        """
        if change:
            raise MbcError("MBC338", f"the trainer cannot follow a change: {change}", _UNDO)

    def synchronize(self) -> None:
        """Wait until the GPU has done all steps."""
        self.module.wait()

    def close(self) -> None:
        """Give the model memory of its own and free the plan's; the optimizer's own `step` works again."""
        self._in_flight = None
        self._close()

    def __enter__(self) -> Self:
        """Return the trainer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the trainer."""
        self.close()


def make_trainer(
    model: Any,
    example: Any,
    *,
    loss: Any,
    optimizer: Any,
    targets: Any,
    clip_norm: float,
    accumulate: int,
    ema: float,
    memory: str | int,
    precision: Any,
    device: str,
    seed: int,
    measure_for: str | None,
    check: bool | None,
    progress: bool,
) -> Trainer:
    """Return a trainer of a model; `mbc.from_torch` documents the arguments and errors.

    Raises:
        MbcError: The errors of `mbc.from_torch`.
    """
    began_s = time.perf_counter()
    measure_for_s = duration_of("measure_for", measure_for)
    refuse_model(model)
    if device == "cuda" and current_gpu() is None:
        report_no_gpu("none is visible to this process")
    _check_alone(model)
    with busy("making a trainer") if progress else nullcontext(silent) as say:
        say("import")
        exported, text, read = import_training(
            model, example, loss=loss, optimizer=optimizer, targets=targets, clip_norm=clip_norm, accumulate=accumulate,
            ema=ema, check=check,
        )  # fmt: skip
        network = exported.network
        imported_s, stages = time.perf_counter(), Stages(announce=say)
        settings = (("memory.device", memory_text(memory)), ("train.precision", precision_name(precision)))
        options = Options(settings=settings, measure_for_s=measure_for_s)
        free_unused()
        kind = partial(Module, allocate=TorchMemory)
        module = open_compiled(kind, Source(f"{network.name}.mbc", text), options, stages, device, seed)
        module.load_state_dict(network.arrays)
    took = Took(
        time.perf_counter() - began_s,
        imported_s - began_s,
        stages.planning_seconds,
        stages.measuring_seconds,
        stages.building_seconds,
    )
    return Trainer(model, optimizer, exported, text, module, updates_of(optimizer), read, loss_modules(loss), took)


def import_training(
    model: Any,
    example: Any,
    *,
    loss: Any,
    optimizer: Any,
    targets: Any = None,
    clip_norm: float = 0.0,
    accumulate: int = 1,
    ema: float = 0.0,
    check: bool | None = False,
) -> tuple[Exported, str, list[Target]]:
    """Return the network of a model that `refuse_model` accepts, the source of its training, and its targets.

    The arguments and errors are those of `mbc.from_torch`.
    """
    objectives = losses_of(loss)
    updates = updates_of(optimizer)
    trained = check_parameters(optimizer, model)
    examples = example_tensors(example)
    exported = network_of(model, examples, trained)
    network = exported.network
    states = {key.name: key.state for key in network.keys if key.state}
    names = dict[int, list[str]]()
    for key, tensor in model.named_parameters(remove_duplicate=False):
        if key in states and states[key] not in (*network.frozen, *names.get(id(tensor), ())):
            names.setdefault(id(tensor), []).append(states[key])
    entries = entries_of(updates, optimizer, lambda parameter: names.get(id(parameter), ()))
    entries += settings_of_updates(clip_norm, accumulate, ema)
    read = fitted(objectives, loss, network, targets)
    objectives = [None if target is None else target.objective for target in read]
    text = write_source(network, objectives, "Made from a model of PyTorch.", training=entries)
    check_source(text, network)
    subject = Subject(network, text, objectives, judges_of(loss), exported.used)
    check_model(model, examples, subject, trained, check, export_model)
    return exported, text, [target for target in read if target is not None]


def _check_alone(model: Any) -> None:
    """Raise MBC333 if an open trainer trains the model, or a model that shares parameters with it.

    Raises:
        MbcError: MBC333.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for other, held in _trainers.items():
        trainer = held()
        if trainer is not None and trainer.open and not own.isdisjoint(map(id, other.parameters())):
            raise MbcError("MBC333", "another trainer trains this model", "close it first: trainer.close()")


def _refuse_step(*_: object) -> None:
    raise MbcError("MBC334", "optimizer.step() was called while mbc trains its model", "call only trainer.step")


def _release(
    move_back: Callable[[], Any],
    module: Module,
    states: SharedStates,
    optimizer_states: OptimizerStates,
    hooks: Sequence[Any],
) -> None:
    for handle in hooks:
        handle.remove()
    states.part()
    move_back()
    optimizer_states.part()
    module.close()
