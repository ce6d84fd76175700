"""The plan of a model for one shape of its inputs, as the calls of a PyTorch model use it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from mbc.errors import MbcError
from mbc.interchange.steps import Imported
from mbc.ops.random import Dropout
from mbc.pytorch.compiled_model import copied, evaluated, ordered
from mbc.pytorch.copies import copy_model
from mbc.pytorch.exported_model import Exported
from mbc.pytorch.model_tensors import output_tensors, readable
from mbc.pytorch.own_backward import untouched
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.halves import Halves

torch: Any = importlib.import_module("torch")
pytree: Any = importlib.import_module("torch.utils._pytree")
_DTYPES = {torch.float32: "f4", torch.float64: "f8", torch.int32: "i4", torch.int64: "i8", torch.uint8: "u1"}


@dataclass(frozen=True)
class PlannedProgram:
    """A compiled network, with inputs and outputs in PyTorch's terms.

    Attributes:
        exported: The network that was imported from the model.
        source: Its source.
        halves: The compiled network.
        structure: The structure of the model's outputs.
        leaves: The leaves of the outputs, None in place of each tensor.
    """

    exported: Exported
    source: str
    halves: Halves
    structure: Any
    leaves: tuple[Any, ...]

    @cached_property
    def reached(self) -> tuple[frozenset[str], ...]:
        """For each output, the states and inputs with respect to which PyTorch would differentiate it."""
        network, inputs = self.exported.network, self.halves.taken
        return tuple(_reached(network, inputs, value) for value in network.outputs)

    @cached_property
    def draws(self) -> bool:
        """True if a step draws random numbers."""
        return any(isinstance(op.attributes, Dropout) for op in self.halves.plan.graph.train)

    def reached_by(self, gradients: Sequence[Any]) -> frozenset[str]:
        """Return the states and inputs that get a gradient from those of the outputs, where None is no gradient."""
        if all(gradient is not None for gradient in gradients):
            return self._reached_in_all
        rows = zip(self.reached, gradients, strict=True)
        return frozenset[str]().union(*(names for names, gradient in rows if gradient is not None))

    @cached_property
    def _reached_in_all(self) -> frozenset[str]:
        return frozenset[str]().union(*self.reached)

    def refusal(self, inputs: Sequence[Any], training: bool) -> str:
        """Return why the program does not take these inputs; an empty text if it does."""
        batch, whole = self.halves.batch, training or self.halves.whole_batches
        for position, (name, shape) in zip(self.exported.used, self.exported.network.inputs, strict=True):
            given = tuple(inputs[position].shape)
            rows = given[0] if given else 0
            if given[1:] != tuple(shape[1:]) or (rows != batch if whole else not 0 < rows <= batch):
                return f"the input '{name}' is {list(given)}, but the plan is for {list(shape)}"
        return ""

    def read(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs of the model that the network reads."""
        return [inputs[position] for position in self.exported.used]

    def begin(self, inputs: Sequence[Any]) -> int:
        """Run the first half of a step for inputs of `read`, and return the number of the mini-batch."""
        with ordered(self.halves.device):
            return self.halves.begin(*(_array(tensor, self.halves.device) for tensor in inputs))

    def finish(self, gradients: Sequence[Any], add: bool, number: int | None, rate: float | None = 0.0) -> None:
        """Run the second half of a step for the gradients of the outputs, where None is 0.

        The other arguments are those of `Halves.finish`.
        """
        device = self.halves.device
        zeros = partial(torch.zeros, device=device)
        rows = zip(gradients, self.halves.outputs, strict=True)
        given = [_array(zeros(place.shape) if gradient is None else gradient, device) for gradient, place in rows]
        with ordered(device):
            self.halves.finish(given, add, number, rate)

    def outputs(self) -> list[Any]:
        """Return copies of the outputs between the halves."""
        if self.halves.device == "cpu":
            return [torch.from_numpy(self.halves.copied(place)) for place in self.halves.outputs]
        return [copied(tensor) for tensor in self._output_places]

    @cached_property
    def _output_places(self) -> list[Any]:
        """The outputs between the halves, in the GPU's memory."""
        with torch.inference_mode(False):
            return [torch.from_dlpack(self.halves.shared(place)) for place in self.halves.outputs]

    def close(self) -> None:
        """Free the program's memory."""
        self.__dict__.pop("_output_places", None)  # tensors that hold the memory
        self.halves.close()

    def evaluated(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the inference pass for inputs of `read`."""
        return evaluated(self.halves, inputs)

    def structured(self, tensors: Sequence[Any]) -> Any:
        """Return outputs in the structure that the model returns."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is None else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


def _array(tensor: Any, device: str) -> Any:
    """Return a tensor as a plan on `device` reads it.

    Plans read tensors on PyTorch's GPU by their address, because `ordered` orders the streams.
    """
    tensor = readable(tensor)
    dtype = _DTYPES.get(tensor.dtype) if device == "cuda" and tensor.is_cuda else None
    if dtype is None or tensor.get_device() != torch.cuda.current_device():
        return tensor
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), dtype, tensor, None)


def _reached(network: Imported, inputs: Sequence[str], output: int) -> frozenset[str]:
    """Return the states and inputs on which an output depends in PyTorch's graph, which ends at detached values."""
    values, names = {output}, set[str]()
    for step in reversed(network.steps):
        if step.op != "detach" and not values.isdisjoint(step.results):
            values.update(step.values)
            names.update(state.name(step.label) for state in step.states)
    return frozenset(names.union(name for number, name in enumerate(inputs) if number in values))


def inner_product(output: Any, factor: Any) -> Any:
    """Return the sum of the products of two tensors, as the loss `inner_product` of the language."""
    return (output * factor).sum()


def structure_of(model: Any, example: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the structure of a model's outputs, and their leaves, with None in place of each tensor.

    Raises:
        MbcError: MBC330 for outputs whose structure PyTorch does not know.
    """
    with untouched(model), torch.no_grad():
        try:  # without numbers, which takes neither time nor memory
            outputs = copy_model(model, "meta")(*[tensor.detach().to("meta") for tensor in example])
        except Exception:  # a model may read numbers, or make tensors on a device that it names
            outputs = copy_model(model)(*[tensor.detach().cpu().clone() for tensor in example])
    leaves, structure = pytree.tree_flatten(outputs)
    tensors = output_tensors(outputs)
    if [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)] != [id(tensor) for tensor in tensors]:
        raise MbcError(
            "MBC330",
            f"the model returns a {type(outputs).__name__}, which PyTorch does not take apart",
            "return tensors, or register the class with torch.utils._pytree",
        )
    return structure, tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
