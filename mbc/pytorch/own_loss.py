"""A step whose loss is a function of the user's own, which PyTorch computes between the halves of the plan.

The first half of the step computes the outputs. PyTorch computes the loss and the gradients of the outputs. The second
half computes all other gradients and updates the parameters. A step of several mini-batches runs both halves for each
mini-batch, and updates the parameters with the mean of the gradients after the last one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from mbc.errors import MbcError
from mbc.pytorch.own_backward import nodes_of
from mbc.pytorch.planned_program import PlannedProgram

torch: Any = importlib.import_module("torch")
pytree: Any = importlib.import_module("torch.utils._pytree")


class OwnLoss:
    """A loss function, and the program of the model whose outputs it gets.

    Attributes:
        is_running: True while PyTorch computes a loss; what the second half of the step reads is in the arena then.
    """

    def __init__(self, function: Callable[..., Any], program: PlannedProgram, model: Any) -> None:
        """Take a function of the outputs, in the structure in which the model returns them, and of the targets."""
        self._function, self._program, self._model = function, program, model
        scale = program.halves.loss_scale
        self._scale = None if scale is None else torch.from_dlpack(program.halves.shared(scale))
        self._count = program.halves.step_batch // program.halves.batch
        self.is_running = False

    def step(self, inputs: Sequence[Any], targets: Sequence[Any], rate: float, count: Callable[[], None]) -> Any:
        """Train on all mini-batches of a step and return the mean of their losses, as a tensor without a graph.

        If the function raises an error, no parameter and no state of the optimizer has changed.

        Args:
            inputs: The inputs of the model.
            targets: All other arguments of the function.
            rate: The learning rate.
            count: A function that is called after each mini-batch.

        Raises:
            MbcError: The errors of a mini-batch.
        """
        rows, losses = self._program.halves.step_batch, list[Any]()
        for number in range(self._count):
            part = slice(rows // self._count * number, rows // self._count * (number + 1))
            images, labels = ([_rows(x, rows, part) if self._count > 1 else x for x in xs] for xs in (inputs, targets))
            losses.append(self._mini_batch(images, labels, number, rate if part.stop == rows else None))
            count()
        return losses[0] if self._count == 1 else torch.stack(losses).mean()

    def _mini_batch(self, inputs: Sequence[Any], targets: Sequence[Any], number: int, rate: float | None) -> Any:
        """Run both halves for a mini-batch and return its loss.

        Args:
            inputs: The inputs of the model.
            targets: All other arguments of the function.
            number: The number of the mini-batch in its step; mini-batch 0 overwrites the gradients of earlier steps.
            rate: The learning rate for the last mini-batch of a step, None for the others, which update nothing.

        Raises:
            MbcError: MBC331 if the result is not one number that depends on an output and on no parameter of the model,
                and the errors of `Halves`.
        """
        program, gradients = self._program, list[Any]()
        whole = len(inputs) == program.exported.inputs  # otherwise an error names what is missing
        program.begin(program.read(inputs) if whole else inputs)
        self.is_running = True
        try:
            with torch.inference_mode(False), torch.enable_grad():
                factor = self._count if self._scale is None else self._scale * self._count
                outputs = _Outputs.apply(program, gradients, factor, torch.zeros((), requires_grad=True))
                node = outputs[0].grad_fn
                loss = self._function(program.structured(outputs), *targets)
                self._check(loss, node)
                loss.backward(torch.full_like(loss, 1 / self._count))
        finally:
            self.is_running = False
        self._check_read(gradients)
        program.finish(gradients, number > 0, None, rate)
        return loss.detach()

    def _check(self, loss: Any, node: Any) -> None:
        """Raise MBC331 unless a loss is one number that depends on an output and on no parameter of the model.

        Raises:
            MbcError: MBC331.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            _refuse(f"the loss is {got}, not a tensor with one number", "return a mean or a sum over the mini-batch")
        reached = nodes_of([loss], set())
        if node not in reached:
            remedy = "compute it from the outputs, without detach(), item() and no_grad()"
            _refuse("the loss has no gradient with respect to the outputs of the model", remedy)
        leaves = {id(leaf.variable) for leaf in reached if hasattr(leaf, "variable")}
        names = [name for name, parameter in self._model.named_parameters() if id(parameter) in leaves]
        if names:
            remedy = "set weight_decay in the optimizer, or use mbc.module, where PyTorch adds up all gradients"
            _refuse(f"the loss reads the parameter '{names[0]}', whose gradient the plan would not add", remedy)

    def _check_read(self, gradients: Sequence[Any]) -> None:
        """Raise MBC331 for a trained parameter without a gradient, which PyTorch's optimizers would leave as it is.

        Raises:
            MbcError: MBC331.
        """
        if None not in gradients:
            return
        network = self._program.exported.network
        without = {"", *network.frozen, *self._program.reached_by(gradients)}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        left = [key.name for key in network.keys if key.name in parameters and key.state not in without]
        if left:
            remedy = "set requires_grad=False for such parameters, or use mbc.module, which leaves them as they are"
            _refuse(f"the loss reads no output on which '{left[0]}' acts, but the plan would update it", remedy)


class _Outputs(torch.autograd.Function):
    """The outputs of a step as one node of PyTorch's graph, which collects their gradients."""

    @staticmethod
    def forward(ctx: Any, program: PlannedProgram, gradients: list[Any], scale: Any, _: Any) -> tuple[Any, ...]:
        """Return copies of the outputs.

        Args:
            ctx: What the backward pass reads.
            program: The program that computed the outputs.
            gradients: The list that gets the gradients of the outputs.
            scale: The factor by which these gradients are multiplied in their own type: the loss scale times the
                number of mini-batches, by which the loss was divided.
            _: A tensor that needs a gradient, so that the outputs need gradients.
        """
        ctx.collected, ctx.scale = gradients, scale
        ctx.set_materialize_grads(False)
        return tuple(program.outputs())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        """Store the gradients, None for an output that the loss does not read."""
        ctx.collected[:] = [g if g is None else g * ctx.scale for g in gradients]
        return None, None, None, None


def _rows(value: Any, rows: int, part: slice) -> Any:
    """Return the part of an argument that belongs to one mini-batch of a step.

    Args:
        value: An argument of the model or of the loss function.
        rows: The number of rows of the step.
        part: The rows of the mini-batch.

    Raises:
        MbcError: MBC331 for an object that mbc cannot divide, because its class does not say what its rows are.
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[part] if value.ndim and value.shape[0] == rows else value
    if isinstance(value, (type(None), bool, int, float, str)):
        return value
    entries: list[Any]
    entries, structure = pytree.tree_flatten(value, is_leaf=lambda entry: entry is not value)  # pyright: ignore
    divisible = all([*getattr(entry, "shape", ())][:1] == [rows] for entry in entries)
    if structure.type is list and len(entries) == rows and not divisible:  # an entry for each row
        return entries[part]
    if any(entry is value for entry in entries):
        what = f"the loss gets a {type(value).__name__}, which mbc does not divide into mini-batches"
        _refuse(what, "pass tensors, numbers and texts, also in tuples, lists and dicts")
    return pytree.tree_unflatten([_rows(entry, rows, part) for entry in entries], structure)


def _refuse(reason: str, remedy: str) -> NoReturn:
    raise MbcError("MBC331", reason, remedy)
