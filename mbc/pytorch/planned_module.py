"""A PyTorch model whose forward and backward pass are one plan: `mbc.module`.

The model stays the user's object. Its `forward` runs the first half of a planned step; PyTorch computes the loss; its
backward pass runs the second half. Inputs of another shape get a program of their own over the same memory. Calls that
no program covers run in PyTorch, on the same parameters.
"""

from __future__ import annotations

import importlib
import inspect
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from mbc.errors import MbcError
from mbc.pytorch.calling_thread import CallingThread
from mbc.pytorch.eval_checks import EvalChecks
from mbc.pytorch.gradients_out import finish
from mbc.pytorch.model_changes import ModelChanges, autocast_reason
from mbc.pytorch.model_tensors import by_position
from mbc.pytorch.pending_passes import PendingPasses, Ticket
from mbc.pytorch.planned_program import PlannedProgram
from mbc.pytorch.process_memory import SEGMENT_BYTES, MemoryChecks, free_unused
from mbc.pytorch.second_derivatives import differentiable
from mbc.pytorch.shared_states import SharedStates
from mbc.units import show_size

torch: Any = importlib.import_module("torch")
MOST_PROGRAMS = 6  # of one model; each takes seconds to plan, and memory for its code


class Compilation(Protocol):
    """Compiles the programs of one model."""

    def further(self, model: Any, inputs: Sequence[Any], first: PlannedProgram) -> PlannedProgram:
        """Return a program for other inputs, over the memory of the first program."""
        ...

    def excess_bytes(self, first: PlannedProgram) -> int:
        """Return by how many bytes the process exceeds the memory that it may take."""
        ...

    def smaller(self, first: PlannedProgram, less_bytes: int) -> PlannedProgram:
        """Return a program that takes so many bytes less than the first program, which is closed."""
        ...


class Forward:
    """The `forward` of a model with a plan; that of a copy or a loaded model runs in PyTorch."""

    def __init__(self, model: Any, planned: Planned | None = None) -> None:
        """Take a model, and its plan if it has one."""
        self._model, self.planned = weakref.ref(model), planned

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of the model."""
        planned = None if torch.compiler.is_exporting() or torch.jit.is_tracing() else self.planned
        return self.in_torch(*inputs, **named) if planned is None else planned(self, inputs, named)

    @property
    def __code__(self) -> Any:
        """That of the class's `forward`, which torch.export reads."""
        return self._own.__code__

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's `forward`, which trainers look at to choose arguments."""
        return inspect.signature(self._own)

    def in_torch(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs that PyTorch computes."""
        return self._own(*inputs, **named)

    @property
    def _own(self) -> Any:
        """The method `forward` of the model's class."""
        model: Any = self._model()
        return model.__class__.forward.__get__(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """Return the `forward` of a copied model, which has no plan."""
        return Forward(memo[id(self._model())])

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the `forward` of a loaded model, which has no plan."""
        return Forward, (self._model(),)


class Planned:
    """The plan of a model, in use.

    Attributes:
        programs: The programs of the model, one for each shape of its inputs; the first has that of the example.
    """

    def __init__(self, model: Any, program: PlannedProgram, compilation: Compilation, strict: bool) -> None:
        """Share the model's tensors, and put the plan behind its `forward`.

        Args:
            model: The model.
            program: Its program for inputs like the example.
            compilation: Compiles further programs.
            strict: Whether calls that no program covers are refused.
        """
        self.programs = [program]
        self._model, self._compilation, self._strict = weakref.ref(model), compilation, strict
        self._states: SharedStates
        self._thread = CallingThread()
        self._share(model, program)
        pairs = zip(program.exported.used, program.halves.taken, strict=True)
        covered = [n for n, name in pairs if name in self._states.inputs]
        self._without_gradient = [n for n in range(program.exported.inputs) if n not in covered]
        self._changes = ModelChanges(model)
        self._refused: dict[tuple[Any, ...], str] = {}  # shapes of inputs for which there can be no program
        self._said: set[str] = set()
        self._turns = threading.RLock()  # calls and backward passes of several threads run one after another
        self._memory_checks = MemoryChecks()
        self._eval_checks = EvalChecks(self.halves.plan.graph.precision)

    def _share(self, model: Any, program: PlannedProgram, gradients: Sequence[str] = ()) -> None:
        """Share the model's tensors with a program, and these parameters' gradients, and put it behind the model."""
        self.programs[:] = [program]
        self._pending = PendingPasses()
        self._states = SharedStates(model, program.exported.network, program.halves, program.halves.gradients)
        self._states.take_gradients(gradients)
        model.forward = Forward(model, self)
        self._close = weakref.finalize(model, _close, self.programs, self._thread)
        free_unused()  # the tensors' earlier memory

    @property
    def source(self) -> str:
        """The network in mbc's language."""
        return self.programs[0].source

    @property
    def halves(self) -> Any:
        """The compiled network."""
        return self.programs[0].halves

    @property
    def open(self) -> bool:
        """True until the plan is closed."""
        return self._close.alive

    def close(self) -> None:
        """Give the model memory of its own and free the plan's; from now on the model runs in PyTorch."""
        model = self._model()
        if self.open and model is not None:
            self._free(model)

    def _free(self, model: Any) -> list[str]:
        """Close the plan as `close` does; return the names of the parameters whose gradients were in its memory."""
        gradients = self._states.part()
        self._pending = PendingPasses()  # the earlier ones hold tensors over the plan's memory
        del model.forward
        self._close()
        self._states.settle()
        return gradients

    @torch.compiler.disable
    def __call__(self, forward: Forward, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the outputs of one call of the model."""
        with self._turns:
            outputs, covered = self._outputs(self._model(), inputs, named)
        return outputs if covered else forward.in_torch(*inputs, **named)

    def _outputs(self, model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, bool]:
        """Return the outputs of one call, and whether a program covers it."""
        if not self._fits(model):
            return None, False
        given = by_position(model, inputs, named)
        reason = self._refusal(model, given)
        program = self.programs[0]
        if not reason:
            program, reason = self._program_for(model, given)
        if reason := reason or self._pending.put_away():
            self._say(reason)
            return None, False
        read = program.read(given)
        if not model.training:
            if reason := self._eval_checks.reason(
                model, given, lambda x: program.structured(program.evaluated(program.read(x)))
            ):
                self._say(reason)
                return None, False
            return program.structured(program.evaluated(read)), True
        ticket = self._pending.begin(program, read)
        self._states.count()
        if not torch.is_grad_enabled():
            return program.structured(program.outputs()), True
        ticket.versions = self._states.versions(program.halves.read_again)
        asked = {name for name, tensor in zip(program.halves.taken, read, strict=True) if tensor.requires_grad}
        trained, reached = self._states.names, enumerate(program.reached)
        ticket.constant = [n for n, names in reached if names.isdisjoint(trained) and names.isdisjoint(asked)]
        self._thread.keep(program.halves.device)
        ticket.leaves = self._states.leaves(ticket)
        return program.structured(_apply(self, ticket, given, *read, ticket.leaves.tensor)), True

    @torch.compiler.disable  # a compiled function may call `loss.backward()`
    def backward(self, ticket: Ticket, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of inputs, None for those that are not computed, and hand on those of parameters.

        Args:
            ticket: That of the forward pass.
            gradients: The gradients of the outputs, None for those that the loss does not read.

        Raises:
            RuntimeError: The values of the forward pass were used already, or their plan was closed, or a tensor that
                both passes read changed.
        """
        if not self.open:
            raise RuntimeError("the plan of this model was closed after the forward pass: call the model again")
        if ticket.used:
            raise RuntimeError(
                "mbc freed the values of a forward pass in its backward pass: pass retain_graph=True to the earlier "
                "backward pass, or call the model again"
            )
        program, halves, leaves = ticket.program, ticket.program.halves, ticket.leaves
        assert leaves is not None
        if name := self._changed_since(ticket):
            raise RuntimeError(
                f"'{name}' has changed since the forward pass, and the backward pass needs its earlier numbers: update "
                "the parameters after the backward passes"
            )
        reached, again = program.reached_by(gradients), torch._C._autograd._get_current_graph_task_keep_graph()
        # The first program holds the memory of all gradients.
        with self._turns, self.halves.lent(), halves.lent():
            self._pending.take_back(ticket, again)
            ticket.used = not again
            handed = finish(self._states, leaves, reached, lambda add: program.finish(gradients, add, ticket.number))
            leaves.hand(handed)
            of_inputs = [self._states.inputs.get(name) if name in reached else None for name in halves.taken]
            self._memory_checks.passes += 1
            return [None if gradient is None else gradient.clone() for gradient in of_inputs]

    def differentiable(self, ticket: Ticket, inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of inputs, and hand on those of parameters, computed by PyTorch with a graph.

        Args:
            ticket: The ticket of the forward pass.
            inputs: The inputs of the model in the forward pass.
            gradients: The gradients of the outputs, None for outputs that the loss does not read.

        Raises:
            RuntimeError: PyTorch cannot repeat the forward pass, because the pass drew random numbers, or because the
                model has changed since.
            MbcError: MBC339 with `fallback="error"`.
        """
        program = ticket.program
        model: Any = self._model()
        is_unchanged = len(inputs) == program.exported.inputs and self.open and not self._changed_since(ticket)
        if not is_unchanged or program.draws or self._changes.reason(True) or not model.training:
            raise RuntimeError(
                "mbc computes no second derivatives (create_graph=True) of a model that drew random numbers or has "
                "changed since its forward pass. Close the plan of this model: PyTorch then computes both passes"
            )
        self._say("it is differentiated twice (create_graph=True)")
        assert ticket.leaves is not None
        read = program.read(inputs)
        derivatives = differentiable(model, inputs, gradients, [*read, *ticket.leaves.parameters])
        ticket.leaves.hand(derivatives[len(read) :])
        return derivatives[: len(read)]

    def _changed_since(self, ticket: Ticket) -> str:
        """Return the name of a tensor that both passes read and that has changed between them, or an empty text."""
        return self._states.changed(ticket.program.halves.read_again, ticket.versions)

    def _fits(self, model: Any) -> bool:
        """Return whether the plan stays; plan again if the process takes more memory than it may.

        Raises:
            MbcError: MBC341 if no smaller plan fits and PyTorch must not run the model.
        """
        trains = model.training and torch.is_grad_enabled()  # tensors made in torch.inference_mode cannot be trained
        if not (trains and self._memory_checks.is_due and self._pending.is_empty):
            return True
        self._memory_checks.checked = self._memory_checks.passes
        first = self.programs[0]
        excess = self._compilation.excess_bytes(first)
        if excess <= 0:
            return True
        what = f"the process takes {show_size(excess)} more than memory="
        if self._memory_checks.replanned:
            self._warn(f"{what}, though it was planned again")
            return True
        self._memory_checks.replanned = True
        gradients = self._free(model)
        try:
            self._share(model, self._compilation.smaller(first, excess + SEGMENT_BYTES), gradients)
        except MbcError as error:
            message = f"{what}, and no smaller plan fits ({error.code}): {error.message}"
            if self._strict:
                raise MbcError("MBC341", message, "raise memory=, or pass fallback='torch'") from error
            self._warn(f"the model runs in PyTorch from now on: {message}")
            return False
        self._refused.clear()
        return True

    def _program_for(self, model: Any, inputs: Sequence[Any]) -> tuple[PlannedProgram, str]:
        """Return the program for these inputs, which is planned now if there is none, and why there cannot be one."""
        refusals = [program.refusal(inputs, model.training) for program in self.programs]
        if "" in refusals:
            return self.programs[refusals.index("")], ""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        if shapes not in self._refused and model.training:
            if reason := self._pending.put_away():  # a program that is opened overwrites the arena
                return self.programs[0], reason
            if len(self.programs) == MOST_PROGRAMS:
                return self.programs[0], f"{refusals[0]}, and a model has at most {MOST_PROGRAMS} programs"
            try:
                with self._states.kept():
                    self.programs.append(self._compilation.further(model, inputs, self.programs[0]))
            except MbcError as error:
                self._refused[shapes] = (
                    f"{refusals[0]}, and another program was refused ({error.code}): {error.message}"
                )
            else:
                return self.programs[-1], ""
        return self.programs[0], self._refused.get(shapes, refusals[0])

    def _refusal(self, model: Any, inputs: tuple[Any, ...]) -> str:
        """Return why no program can cover a call; an empty text if one may."""
        return (
            self._input_refusal(inputs)
            or (
                not model.training
                and torch.is_grad_enabled()
                and "a call in eval mode may need gradients (without them: torch.no_grad())"
            )
            or self._changes.reason(model.training)
            or autocast_reason(str(self.halves.plan.graph.precision))
            or self._states.refresh()
        )

    def _input_refusal(self, inputs: tuple[Any, ...]) -> str:
        count = self.programs[0].exported.inputs
        if len(inputs) != count or not all(isinstance(x, torch.Tensor) for x in inputs):
            return "it is called with other arguments than the example"
        if torch.is_grad_enabled() and any(inputs[n].requires_grad for n in self._without_gradient):
            return "an input needs a gradient that the example did not need"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "it is called within a transform of torch.func"
        if torch.autograd.forward_ad._current_level >= 0:
            return "it is called within forward-mode differentiation"
        return ""

    def _say(self, reason: str) -> None:
        """Report a call that the plan does not cover, once for each reason.

        Raises:
            MbcError: MBC339 if such calls are refused.
        """
        if self._strict:
            _refuse(reason)
        self._warn(f"this call of the model runs in PyTorch: {reason}")

    def _warn(self, message: str) -> None:
        """Warn, once for each message."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=7)


def _close(programs: Sequence[PlannedProgram], thread: CallingThread) -> None:
    """Give autograd its threads back, and close all programs.

    The first program closes last, because its memory holds the others.
    """
    thread.release()
    for program in reversed(programs):
        program.close()


def _refuse(reason: str) -> NoReturn:
    message = f"the plan does not cover this call: {reason}"
    raise MbcError("MBC339", message, "allow PyTorch to run it: fallback='torch'")


class _Step(torch.autograd.Function):
    """The planned step as one node of PyTorch's graph."""

    @staticmethod
    def forward(ctx: Any, planned: Planned, ticket: Ticket, inputs: Sequence[Any], *_: Any) -> tuple[Any, ...]:
        """Return the outputs; arguments are inputs and parameters, so that PyTorch asks for their gradients."""
        ctx.save_for_backward(*(tensor for tensor in inputs if not tensor.is_inference()))
        ctx.planned, ctx.ticket = planned, ticket
        ctx.set_materialize_grads(False)
        outputs = tuple(ticket.program.outputs())
        ctx.mark_non_differentiable(*(outputs[number] for number in ticket.constant))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of the inputs; the node of the parameters has theirs."""
        if torch.is_grad_enabled():  # PyTorch would take the plan's gradients as constants, without a word
            of_inputs = ctx.planned.differentiable(ctx.ticket, ctx.saved_tensors, gradients)
        else:
            of_inputs = ctx.planned.backward(ctx.ticket, gradients)
        return None, None, None, *of_inputs, None


# `_Step.apply` first looks at each argument for transforms of torch.func, within which calls run in PyTorch.
_apply: Any = super(torch.autograd.Function, _Step).apply  # pyright: ignore
