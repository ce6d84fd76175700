"""Parameters, statistics and gradients of a model as tensors over a plan's own memory.

Each tensor has a storage of its own, of exactly its bytes, at the address that the plan gave it: there is one copy of
the weights, which PyTorch's optimizer updates and the plan reads. A tensor that PyTorch moved or replaced is taken in
at the next call, unless somebody still holds the tensor's new memory or its place in the plan: copying would change or
bypass numbers that the holder relies on (moving averages that are swapped in, flat parameters).
"""

from __future__ import annotations

import importlib
import weakref
from collections import Counter
from collections.abc import Container, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mbc.errors import MbcError
from mbc.interchange.steps import Imported
from mbc.runtime.bindings import Place
from mbc.runtime.module import Module

torch: Any = importlib.import_module("torch")


@dataclass(slots=True)
class Shared:
    """A tensor of the model, and its memory in the plan.

    Attributes:
        name: Name of the tensor in the model.
        table: The table of its module that holds the tensor.
        key: The tensor's key in the table.
        home: The place of the tensor in the plan.
        view: A tensor over that place, in the shape of the model's tensor, for mbc alone.
        lent: Refers to the object that holds the memory of the tensor that PyTorch was given.
        place: The place of its gradient; None if the plan does not train it.
        gradient: A tensor over that place, for mbc alone.
        owner: Refers to the object that holds the memory of the gradient that PyTorch was given, if one was.
    """

    name: str
    table: dict[str, Any]
    key: str
    home: Place
    view: Any
    lent: weakref.ref[Any] | None = None
    place: Place | None = None
    gradient: Any = None
    owner: weakref.ref[Any] | None = None

    @property
    def tensor(self) -> Any:
        """The model's tensor."""
        return self.table[self.key]

    @property
    def is_held(self) -> bool:
        """True if somebody holds the memory of the gradient."""
        return self.owner is not None and self.owner() is not None


class SharedStates:
    """All tensors of a model that its plan shares.

    Attributes:
        shared: All parameters and statistics, in the order of the model.
        trained: The parameters with a gradient in the plan's memory.
        inputs: A tensor over the memory of each input's gradient, by the network's name of the input.
    """

    def __init__(self, model: Any, network: Imported, module: Module, gradients: Mapping[str, Place]) -> None:
        """Move the model's tensors into the plan's memory.

        Args:
            model: The model.
            network: The network that was imported from it.
            module: The compiled network.
            gradients: The place of each gradient that the plan keeps, by the parameter or input.

        Raises:
            MbcError: MBC330 for a tensor that the plan keeps in another type or shape.
        """
        self._module = module
        self.inputs = {
            name: torch.from_dlpack(module.shared(place))
            for name, place in gradients.items()
            if name not in module.places
        }
        self.shared: list[Shared] = []
        states = {key.name: key for key in network.keys}
        taken: set[int] = set()
        self._counters: list[tuple[dict[str, Any], str, int]] = []
        self._constants: list[tuple[str, dict[str, Any], str, Any]] = []
        self._versions: dict[str, tuple[int, int]] = {}
        for name, table, key in _tensors(model):
            entry = states.get(name)
            if entry is not None and entry.per_update:
                self._counters.append((table, key, entry.per_update))
            elif entry is not None and entry.state and id(table[key]) not in taken:
                taken.add(id(table[key]))
                home = module.places[entry.state]
                shared = Shared(name, table, key, home, self._view(home, table[key]))
                shared.place = gradients.get(entry.state)
                if shared.place is not None:
                    shared.gradient = shaped(torch.from_dlpack(module.shared(shared.place)), shared.view)
                self.shared.append(shared)
            elif not isinstance(table[key], torch.nn.Parameter) and id(table[key]) not in taken:
                self._constants.append((name, table, key, table[key].detach().clone()))
        self.trained = tuple(s for s in self.shared if s.place is not None)
        self._addresses = tuple(s.view.data_ptr() for s in self.shared)
        with torch.no_grad():
            for shared in self.shared:
                self._take(shared)

    def refresh(self) -> str:
        """Take in tensors that PyTorch has moved or replaced; return why that is impossible, or an empty text."""
        for name, table, key, numbers in self._constants:
            tensor = table.get(key)
            version = (id(tensor), 0 if tensor is None else tensor._version)
            if self._versions.get(name) != version:  # the numbers are compared once for each version
                if tensor is None or not torch.equal(tensor.to(numbers), numbers):
                    return f"'{name}' has changed, which the plan has as a constant"
                self._versions[name] = version
        moved: list[Shared] = []
        for shared, address in zip(self.shared, self._addresses, strict=True):
            tensor = shared.table.get(shared.key)
            if tensor is None:
                return f"'{shared.name}' was removed"
            if not tensor.is_leaf:
                return f"'{shared.name}' is computed from other tensors"
            if tensor.data_ptr() == address:
                continue
            wanted = shared.view.dtype, shared.view.device, shared.view.shape
            if (tensor.dtype, tensor.device, tensor.shape) != wanted:
                return f"'{shared.name}' is {tensor.dtype} {list(tensor.shape)} on {tensor.device} now"
            moved.append(shared)
        if moved and len({id(shared.tensor) for shared in self.shared}) < len(self.shared):
            return "two of its parameters are one tensor now"
        users = Counter(shared.tensor.untyped_storage()._cdata for shared in moved)
        for shared in moved:
            storage = shared.tensor.untyped_storage()
            if shared.lent is not None and shared.lent() is not None:
                return f"'{shared.name}' was replaced, but its earlier memory is in use (p.copy_ would keep its place)"
            # PyTorch counts the Python object of the storage as well.
            if torch._C._storage_Use_Count(storage._cdata) > users[storage._cdata] + 1:
                return f"'{shared.name}' was replaced by a tensor that is in use elsewhere (p.copy_ copies numbers)"
        with torch.no_grad():
            for shared in moved:
                self._take(shared)
        return ""

    def count(self) -> None:
        """Count a forward pass in the counters of batch norms."""
        if self._counters:
            torch._foreach_add_([t[k] for t, k, _ in self._counters], [number for _, _, number in self._counters])

    def count_on_host(self) -> None:
        """Keep the counters in host memory, where counting launches nothing on a GPU."""
        for table, key, _ in self._counters:
            table[key].data = table[key].data.cpu()

    def give(self, shared: Shared) -> Any:
        """Return a new tensor over the memory of a gradient, and remember its owner."""
        assert shared.place is not None
        owner = self._module.shared(shared.place)
        shared.owner = weakref.ref(owner)
        return shaped(torch.from_dlpack(owner), shared.view)

    @contextmanager
    def kept(self) -> Generator[None]:
        """Keep all tensors within this context, in which a program that is opened may overwrite their memory."""
        tensors = [t for s in self.shared for t in (s.view, s.gradient) if t is not None]
        copies = [tensor.detach().cpu().clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.detach().copy_(copy)

    def part(self) -> list[str]:
        """Give the model memory of its own, with the present numbers.

        Returns:
            The names of the parameters whose gradients were in the plan's memory.
        """
        parted: list[str] = []
        for shared, address in zip(self.shared, self._addresses, strict=True):
            tensor = shared.table.get(shared.key)
            if tensor is None or tensor.data_ptr() != address:
                continue
            gradient = tensor.grad
            if shared.gradient is not None and is_own(shared):
                parted.append(shared.name)
                gradient = gradient.clone()
            tensor.grad = None
            tensor.data = tensor.data.clone()
            tensor.grad = gradient
        return parted

    def take_gradients(self, names: Container[str]) -> None:
        """Move the gradients of these parameters into the plan's memory."""
        for shared in self.trained:
            if shared.name in names:
                shared.gradient.copy_(shared.tensor.grad)
                shared.tensor.grad = self.give(shared)

    def _view(self, place: Place, tensor: Any) -> Any:
        view = torch.from_dlpack(self._module.shared(place))
        if view.dtype != tensor.dtype or view.numel() != tensor.numel():
            raise MbcError(
                "MBC330", f"'{place.value}' is {tensor.dtype}, but the plan keeps {view.dtype}",
                "keep the model in float32, and choose the type of activations by precision=",
            )  # fmt: skip
        return shaped(view, tensor)

    def _take(self, shared: Shared) -> None:
        shared.view.copy_(shared.tensor)
        owner = self._module.shared(shared.home)
        shared.lent = weakref.ref(owner)
        shared.tensor.data = shaped(torch.from_dlpack(owner), shared.view)


def is_own(shared: Shared) -> bool:
    """Return whether the parameter's gradient lies in the plan's memory."""
    gradient = shared.tensor.grad
    return gradient is not None and gradient.data_ptr() == shared.gradient.data_ptr()


def shaped(view: Any, like: Any) -> Any:
    """Return a view of a state's memory in the shape of the model's tensor."""
    return view if view.shape == like.shape else view.view(like.shape)


def _tensors(model: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of each parameter and buffer, the table that holds it, and its key there."""
    for path, module in model.named_modules(remove_duplicate=False):
        tables: tuple[Mapping[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None:
                    yield f"{path}.{key}" if path else key, table, key  # pyright: ignore[reportReturnType]
