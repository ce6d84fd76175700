"""A PyTorch model that mbc trains: planned from an example, stepped in the user's loop, on PyTorch's own tensors."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.pytorch.compiled_model import evaluated, ordered
from mbc.pytorch.eval_checks import EvalChecks
from mbc.pytorch.exported_model import Exported
from mbc.pytorch.model_changes import ModelChanges, autocast_reason
from mbc.pytorch.model_tensors import readable
from mbc.pytorch.optimizer_states import OptimizerStates
from mbc.pytorch.own_loss import OwnLoss
from mbc.pytorch.process_memory import free_unused
from mbc.pytorch.shared_states import SharedStates
from mbc.pytorch.targets import Target, explain
from mbc.pytorch.torch_optimizer import Updates, rate_now
from mbc.runtime.module import Module
from mbc.runtime.opened_plan import report_closed
from mbc.runtime.step_loss import Loss

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
        self, model: Any, optimizer: Any, exported: Exported, source: str, module: Module, updates: Updates,
        targets: Sequence[Target], losses: Sequence[Any], took: Took, own_loss: OwnLoss | None = None,
    ) -> None:  # fmt: skip
        """Take over a model and its optimizer, for a network that was compiled from them."""
        self._own_loss = own_loss
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
        self._eval_checks = EvalChecks(module.plan.graph.precision, flat=True)
        _trainers[model] = weakref.ref(self)
        try:
            self._optimizer_states.refresh()
        except MbcError:
            self.close()
            raise

    def step(self, *inputs: Any, lr: float | None = None) -> Any:
        """Return the loss of one update from inputs and targets: a `Loss`, or a tensor if the loss is a function.

        Args:
            *inputs: Inputs and targets in the order of the source, on the CPU or on the GPU that the trainer runs on.
                If the loss is a function, all that follows the inputs of the model is passed to it behind the outputs.
            lr: The learning rate of the first parameter group. None takes the current rate of the optimizer's groups,
                so that PyTorch's schedulers work.

        Raises:
            MbcError: MBC230 (a closed trainer), MBC331 (a function whose result is no loss), MBC335 (rates or
                hyperparameters that the plan does not allow), MBC336 (another number of samples), MBC338 (a changed
                model), and the errors of `Module.step`.
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
        given = [] if self._own_loss else self._read(inputs)
        autocast = autocast_reason(str(self.module.plan.graph.precision))
        self._follow(self._changes.reason(self._model.training) or autocast or self._states.refresh())
        self._optimizer_states.refresh()
        if self._own_loss is not None:
            parts = inputs[: self._inputs], inputs[self._inputs :]
            result = self._own_loss.step(*parts, rate, self._states.count)
            self._optimizer._opt_called = True  # schedulers read this flag to warn of a wrong order of calls
            return result
        try:
            with ordered(self.module.device):
                loss = self.module.step(*given, lr=rate)
        except MbcError as error:
            explained = explain(self._targets, inputs[self._inputs :], error)
            raise explained from error
        for _ in range(self.module.step_batch // self.module.batch):
            self._states.count()
        self._optimizer._opt_called = True
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

        Raises:
            MbcError: MBC230 (a closed trainer), MBC338 (a model that computes something else in eval mode, or has
                changed), and the errors of `Module.forward`.
        """
        self._check_open()
        self._follow(self._states.refresh())
        part = inputs[: self._inputs]
        if len(part) == self._inputs and (reason := self._eval_checks.reason(self._model, part, self._outputs)):
            remedy = "call the model itself in eval mode: model.eval()(images)"
            raise MbcError("MBC338", f"the trainer evaluates the network that it trains, but {reason}", remedy)
        tensors = evaluated(self.module, self._read(inputs), copy)
        if copy:
            device = getattr(inputs[0], "device", "cpu")
            tensors = [tensor.to(device) for tensor in tensors]
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    def _outputs(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(evaluated(self.module, self._read(inputs)))

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
        """Raise MBC230 if the trainer was closed, and MBC331 within the loss of its step.

        Raises:
            MbcError: MBC230, MBC331.
        """
        if self._own_loss is not None and self._own_loss.is_running:
            remedy = "call the model itself, which PyTorch runs, or call the trainer after the step"
            raise MbcError("MBC331", "the loss calls the trainer whose step it is a part of", remedy)
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


def check_alone(model: Any) -> None:
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
    optimizer_states.part()
    module.close()
    states.settle()
    move_back()
    optimizer_states.settle()
