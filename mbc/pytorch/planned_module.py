"""A PyTorch model whose forward and backward pass are one plan: `mbc.module`.

The model stays the user's object. Its `forward` runs the first half of a planned step; PyTorch computes the loss; its
backward pass runs the second half. Calls that the plan does not cover run in PyTorch, on the same parameters.
"""

from __future__ import annotations

import importlib
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mbc.errors import MbcError
from mbc.pytorch.compiled_model import PRECISIONS
from mbc.pytorch.exported_model import MODULE_HOOKS, Exported
from mbc.pytorch.gradients_out import finish
from mbc.pytorch.model_tensors import entries_of, readable
from mbc.pytorch.shared_states import SharedStates
from mbc.pytorch.watch import settings_of
from mbc.runtime.halves import Halves

torch: Any = importlib.import_module("torch")
pytree: Any = importlib.import_module("torch.utils._pytree")


class Forward:
    """The `forward` of a model with a plan; that of a copy or a loaded model runs in PyTorch."""

    def __init__(self, model: Any, planned: Planned | None = None) -> None:
        """Take a model, and its plan if it has one."""
        self._model, self.planned = weakref.ref(model), planned

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of the model."""
        planned = self.planned
        return self.in_torch(*inputs, **named) if planned is None else planned(self, inputs, named)

    def in_torch(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs that PyTorch computes."""
        model: Any = self._model()
        return model.__class__.forward(model, *inputs, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """Return the `forward` of a copied model, which has no plan."""
        return Forward(memo[id(self._model())])

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the `forward` of a loaded model, which has no plan."""
        return Forward, (self._model(),)


@dataclass(eq=False)
class Ticket:
    """A forward pass whose values are in the arena; `used` after its backward pass."""

    used: bool = False


class Planned:
    """The plan of a model, in use.

    Attributes:
        source: The network in mbc's language.
        halves: The compiled network.
    """

    def __init__(
        self, model: Any, exported: Exported, source: str, halves: Halves, shape: tuple[Any, list[Any]], strict: bool
    ) -> None:
        """Share the model's tensors, and put the plan behind its `forward`.

        Args:
            model: The model.
            exported: Its network.
            source: The network's source.
            halves: The compiled network.
            shape: The structure of the outputs, and the leaves of an example; None in place of each tensor.
            strict: Whether calls that the plan does not cover are refused.
        """
        self.source, self.halves = source, halves
        self._model, self._exported, self._strict = weakref.ref(model), exported, strict
        self._structure, self._leaves = shape
        self._states = SharedStates(model, exported.network, halves)
        covered = [n for n, name in zip(exported.used, halves.taken, strict=True) if name in self._states.inputs]
        self._without_gradient = [n for n in range(exported.inputs) if n not in covered]
        self._settings = settings_of(model)
        self._modes = [(path, module, module.training) for path, module in model.named_modules()]
        self._hooks = [
            (path, getattr(module, name)) for path, module in list(model.named_modules())[1:] for name in MODULE_HOOKS
        ]
        self._grads = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
        self._said: set[str] = set()
        self._ticket: weakref.ref[Ticket] | None = None
        model.forward = Forward(model, self)
        self._close = weakref.finalize(model, halves.close)

    def __call__(self, forward: Forward, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the outputs of one call of the model."""
        reason = self._uncovered(inputs, named)
        if reason:
            self._say(reason)
            return forward.in_torch(*inputs, **named)
        read = [inputs[position] for position in self._exported.used]
        given = [readable(tensor) for tensor in read]
        model: Any = self._model()
        if not model.training:
            return self._structured(self._evaluated(given))
        self._states.count()
        if not torch.is_grad_enabled():
            self.halves.begin(*given)
            return self._structured(self.outputs())
        ticket = Ticket()
        self._ticket = weakref.ref(ticket)
        self.halves.begin(*given)
        return self._structured(_Step.apply(self, ticket, *read, *(s.tensor for s in self._states.trained)))

    @property
    def open(self) -> bool:
        """True until the plan is closed."""
        return self._close.alive

    def close(self) -> None:
        """Give the model memory of its own and free the plan's; from now on the model runs in PyTorch."""
        model = self._model()
        if not self.open or model is None:
            return
        self._states.part()
        del model.forward
        self._close()

    def outputs(self) -> list[Any]:
        """Return copies of the outputs between the halves."""
        if self.halves.device == "cpu":
            return [torch.from_numpy(self.halves.copied(place)) for place in self.halves.outputs]
        return [_copy(self.halves.shared(place)) for place in self.halves.outputs]

    def _evaluated(self, given: Sequence[Any]) -> list[Any]:
        """Return the outputs of the inference pass."""
        outputs: Any = self.halves.forward(*given, copy=self.halves.device == "cpu")
        take: Any = torch.from_numpy if self.halves.device == "cpu" else _copy
        return [take(output) for output in entries_of(outputs)]

    def backward(self, ticket: Ticket, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of inputs and trained parameters, None for those that are in place or not computed.

        Raises:
            RuntimeError: The values of the forward pass were used already.
        """
        if ticket.used or self._ticket is None or self._ticket() is not ticket:
            raise RuntimeError(
                "mbc keeps the values of a forward pass for one backward pass, which has run: call the model again, or "
                "close the plan to use retain_graph"
            )
        ticket.used = True
        given = [readable(gradient) for gradient in gradients]
        handed = finish(self._states, lambda add: self.halves.finish(given, add))
        of_inputs = (self._states.inputs.get(name) for name in self.halves.taken)
        return [*(None if gradient is None else gradient.clone() for gradient in of_inputs), *handed]

    def _structured(self, tensors: Sequence[Any]) -> Any:
        """Return outputs in the structure that the model returns."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is None else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._structure)

    def _uncovered(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> str:
        """Return why the plan does not cover a call; an empty text if it does."""
        model: Any = self._model()
        busy = self._ticket() if self._ticket is not None else None
        return (
            self._of_inputs(inputs, named, model.training)
            or (busy is not None and not busy.used and "the values of an earlier call await their backward pass")
            or (not model.training and torch.is_grad_enabled() and "a call in eval mode may need gradients")
            or self._of_model(model.training)
            or self._of_autocast()
            or self._states.refresh()
        )

    def _of_inputs(self, inputs: tuple[Any, ...], named: dict[str, Any], training: bool) -> str:
        exported, batch = self._exported, self.halves.batch
        if named or len(inputs) != exported.inputs or not all(isinstance(x, torch.Tensor) for x in inputs):
            return "it is called with other arguments than the example"
        if torch.is_grad_enabled() and any(inputs[n].requires_grad for n in self._without_gradient):
            return "an input needs a gradient that the example did not need"
        for position, (name, shape) in zip(exported.used, exported.network.inputs, strict=True):
            given = tuple(inputs[position].shape)
            rows = given[0] if given else 0
            if given[1:] != tuple(shape[1:]) or (rows != batch if training else not 0 < rows <= batch):
                return f"the input '{name}' is {list(given)}, but the plan is for {list(shape)}"
        return ""

    def _of_model(self, training: bool) -> str:
        """Return what has changed in the model since the plan was made."""
        for path, module, mode in self._modes:
            if module.training != (mode and training):
                return f"'{path}.training' is {module.training}"
        for name, held, key, before in self._settings:
            if held.get(key) != before:
                return f"'{name}' was {before!r} and is {held.get(key)!r} now"
        for path, hooks in self._hooks:
            if hooks:
                return f"the module '{path}' has hooks"
        for name, parameter, before in self._grads if training else ():
            if parameter.requires_grad != before:
                return f"'{name}.requires_grad' is {parameter.requires_grad}"
        return ""

    def _of_autocast(self) -> str:
        precision = str(self.halves.plan.graph.precision)
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                asked = PRECISIONS.get(torch.get_autocast_dtype(device), "another type")
                if asked != precision:
                    return f"autocast asks for {asked}, but the plan computes in {precision}"
        return ""

    def _say(self, reason: str) -> None:
        """Report a call that the plan does not cover, once for each reason.

        Raises:
            MbcError: MBC339 if such calls are refused.
        """
        if self._strict:
            _refuse(reason)
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"this call of the model runs in PyTorch: {reason}", RuntimeWarning, stacklevel=6)


def _copy(output: Any) -> Any:
    """Return a copy of an output in the GPU's memory, in float32."""
    return torch.from_dlpack(output).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _refuse(reason: str) -> NoReturn:
    raise MbcError(
        "MBC339", f"the plan does not cover this call: {reason}", "allow PyTorch to run it: fallback='torch'"
    )


class _Step(torch.autograd.Function):
    """The planned step as one node of PyTorch's graph."""

    @staticmethod
    def forward(ctx: Any, planned: Planned, ticket: Ticket, *_: Any) -> tuple[Any, ...]:
        """Return the outputs; inputs and trained parameters are arguments so that PyTorch asks for their gradients."""
        ctx.planned, ctx.ticket = planned, ticket
        return tuple(planned.outputs())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of the inputs and the trained parameters."""
        return None, None, *ctx.planned.backward(ctx.ticket, gradients)
