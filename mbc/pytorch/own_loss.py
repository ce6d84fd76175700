"""A step whose loss is a function of the user's own, which PyTorch computes between the halves of the plan.

The first half of the step computes the outputs. PyTorch computes the loss and the gradients of the outputs. The second
half computes all other gradients and updates the parameters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mbc.errors import MbcError
from mbc.pytorch.own_backward import nodes_of
from mbc.pytorch.planned_program import PlannedProgram

torch: Any = importlib.import_module("torch")


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
        self.is_running = False

    def step(self, inputs: Sequence[Any], targets: Sequence[Any], rate: float) -> Any:
        """Train on one mini-batch and return the loss, as a tensor without a graph.

        If the function raises an error, no state of the model or the optimizer has changed.

        Args:
            inputs: The inputs of the model.
            targets: All other arguments of the function.
            rate: The learning rate.

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
                outputs = _Outputs.apply(program, gradients, self._scale, torch.zeros((), requires_grad=True))
                node = outputs[0].grad_fn
                loss = self._function(program.structured(outputs), *targets)
                self._check(loss, node)
                loss.backward()
        finally:
            self.is_running = False
        self._check_read(gradients)
        program.finish(gradients, False, None, rate)
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
            scale: The loss scale, by which these are multiplied in their own type; None for no loss scale.
            _: A tensor that needs a gradient, so that the outputs need gradients.
        """
        ctx.collected, ctx.scale = gradients, scale
        ctx.set_materialize_grads(False)
        return tuple(program.outputs())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        """Store the gradients, None for an output that the loss does not read."""
        ctx.collected[:] = gradients if ctx.scale is None else [g if g is None else g * ctx.scale for g in gradients]
        return None, None, None, None


def _refuse(reason: str, remedy: str) -> NoReturn:
    raise MbcError("MBC331", reason, remedy)
