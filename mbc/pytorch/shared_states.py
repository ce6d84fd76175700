"""Parameters, statistics and gradients of a model as tensors over a plan's own memory.

Each tensor has a storage of its own, of exactly its bytes, at the address that the plan gave it: there is one copy of
the weights, which PyTorch's optimizer updates and the plan reads. A tensor that PyTorch moved or replaced is taken in
at the next call, unless somebody still holds the tensor's new memory or its place in the plan: copying would change or
bypass numbers that the holder relies on (moving averages that are swapped in, flat parameters).
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add, attrgetter
from typing import Any

from mbc.errors import MbcError
from mbc.interchange.steps import Imported
from mbc.pytorch.leaves import Leaves
from mbc.runtime.bindings import Place
from mbc.runtime.module import Module

torch: Any = importlib.import_module("torch")
_get: Callable[..., Any] = dict[str, Any].get
_version: Callable[[Any], int] = attrgetter("_version")
_is_leaf: Callable[[Any], bool] = attrgetter("is_leaf")
_IN_HOST_MEMORY = (
    "The plan of the model is closed, and its parameters, statistics and gradients are in host memory: free memory of "
    "the device, then call model.to(device)"
)


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
        given: Another tensor over that place, which PyTorch is given as `.grad` in each step.
        takes: How often the tensor was moved into the plan's memory.
    """

    name: str
    table: dict[str, Any]
    key: str
    home: Place
    view: Any
    lent: weakref.ref[Any] | None = None
    place: Place | None = None
    gradient: Any = None
    given: Any = None
    takes: int = 0

    @property
    def tensor(self) -> Any:
        """The model's tensor."""
        return self.table[self.key]


class SharedStates:
    """All tensors of a model that its plan shares.

    Attributes:
        shared: All parameters and statistics, in the order of the model.
        trained: The parameters with a gradient in the plan's memory.
        names: Their names in the network.
        given: For each trained parameter, the tensor over its gradient's memory that PyTorch gets.
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
        self._leaves: Leaves | None = None
        self._constants: list[tuple[str, dict[str, Any], str, Any]] = []
        self._versions: dict[str, tuple[int, int]] = {}
        self._parted: list[tuple[Any, Any, Any, Any]] = []  # tensor, copy, gradient, device
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
                    shared.gradient, shared.given = (
                        shaped(torch.from_dlpack(module.shared(shared.place)), shared.view) for _ in range(2)
                    )
                self.shared.append(shared)
            elif not isinstance(table[key], torch.nn.Parameter) and id(table[key]) not in taken:
                self._constants.append((name, table, key, table[key].detach().clone()))
        counts = [number for _, _, number in self._counters]
        self._counts = counts if len(set(counts)) > 1 else sum(counts[:1])  # one number for all takes less time
        self.trained = tuple(s for s in self.shared if s.place is not None)
        self.names = frozenset(shared.home.value for shared in self.trained)
        self._trained_tables, self._trained_keys = [s.table for s in self.trained], [s.key for s in self.trained]
        self.given: list[Any] = [shared.given for shared in self.trained]
        self._homes = [given.data_ptr() for given in self.given]
        self._storages = [given.untyped_storage() for given in self.given]  # held, so that they can be counted
        self._storage_numbers = [storage._cdata for storage in self._storages]
        self._unused = self._users()
        self._tables, self._keys = [s.table for s in self.shared], [s.key for s in self.shared]
        self._addresses = [s.view.data_ptr() for s in self.shared]
        with torch.no_grad():
            for shared in self.shared:
                self._take(shared)
        self._read: dict[Set[str], tuple[list[Shared], list[Mapping[str, Any]], list[str], list[int]]] = {}

    def refresh(self) -> str:
        """Take in tensors that PyTorch has moved or replaced; return why that is impossible, or an empty text."""
        for name, table, key, numbers in self._constants:
            tensor = table.get(key)
            version = (id(tensor), 0 if tensor is None else tensor._version)
            if self._versions.get(name) != version:  # the numbers are compared once for each version
                if tensor is None or not torch.equal(tensor.to(numbers), numbers):
                    return f"'{name}' has changed, which the plan has as a constant"
                self._versions[name] = version
        if self._all_at_home():
            return ""
        self._leaves = None  # it holds the earlier parameters
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
        self._read.clear()
        return ""

    def _all_at_home(self) -> bool:
        """Return whether all tensors are where the plan has them; fast, because each call asks."""
        tensors: list[Any] = list(map(_get, self._tables, self._keys))
        try:
            addresses: list[int] = list(map(torch.Tensor.data_ptr, tensors))
            return addresses == self._addresses and all(map(_is_leaf, tensors))
        except (TypeError, RuntimeError):  # a tensor was removed, or has no memory
            return False

    def versions(self, states: Set[str]) -> list[int]:
        """Return a number for each tensor of these states that grows when PyTorch changes or replaces the tensor."""
        _, tables, keys, takes = self._rows(states)
        return list(map(add, map(_version, map(_get, tables, keys)), takes))

    def changed(self, states: Set[str], versions: Sequence[int]) -> str:
        """Return the name of a tensor of these states whose version is another one now; an empty text if none is."""
        now = self.versions(states)
        if now == versions:
            return ""
        rows = zip(self._rows(states)[0], versions, now, strict=True)
        return next(shared.name for shared, before, after in rows if before != after)

    def _rows(self, states: Set[str]) -> tuple[list[Shared], list[Mapping[str, Any]], list[str], list[int]]:
        """Return the tensors of states, their tables and keys, and how often each was moved."""
        if states not in self._read:
            shared = [s for s in self.shared if s.home.value in states]
            self._read[states] = shared, [s.table for s in shared], [s.key for s in shared], [s.takes for s in shared]
        return self._read[states]

    def count(self) -> None:
        """Count a forward pass in the counters of batch norms."""
        if self._counters:
            torch._foreach_add_([table[key] for table, key, _ in self._counters], self._counts)

    def count_on_host(self) -> None:
        """Keep the counters in host memory, where counting launches nothing on a GPU."""
        for table, key, _ in self._counters:
            table[key].data = table[key].data.cpu()

    def leaves(self, user: Any) -> Leaves:
        """Return the trained parameters in PyTorch's graph, for a step with this ticket."""
        parameters: list[Any] = list(map(_get, self._trained_tables, self._trained_keys))
        if self._leaves is None or not self._leaves.lend(user, parameters, self._module.device):
            self._leaves = Leaves(parameters, self._module.device)
            self._leaves.lend(user, parameters, self._module.device)
        return self._leaves

    def held(self) -> set[int]:
        """Return the numbers of the trained parameters whose gradient's memory somebody holds.

        Such a gradient is or was a parameter's `.grad`, and a variable or a view holds it. PyTorch may replace the
        memory of a gradient (`p.grad.data = …`). Then the tensor stays with its holder, and another tensor over the
        plan's memory takes its place for the next step.
        """
        if self._users() == self._unused:
            return set()
        for number, (shared, address) in enumerate(zip(self.trained, self._homes, strict=True)):
            if shared.place is not None and shared.given.data_ptr() != address:
                shared.given = shaped(torch.from_dlpack(self._module.shared(shared.place)), shared.view)
                self.given[number], self._storages[number] = shared.given, shared.given.untyped_storage()
                self._storage_numbers[number] = self._storages[number]._cdata
        users = self._users()
        rows = zip(zip(*users, strict=True), zip(*self._unused, strict=True), strict=True)
        return {number for number, (now, unused) in enumerate(rows) if now != unused}

    def _users(self) -> tuple[list[int], ...]:
        """Return the numbers of Python's and of PyTorch's references to each `given`, and those to its memory."""
        given = self.given
        return (
            list(map(sys.getrefcount, given)),
            list(map(torch.Tensor._use_count, given)),
            list(map(torch._C._storage_Use_Count, self._storage_numbers)),
        )

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
        """Copy the model's tensors to host memory, and release the plan's memory.

        The GPU may have no memory for copies beside the plan. Once the plan is closed, `settle` moves them there.

        Returns:
            The names of the parameters whose gradients were in the plan's memory.

        Raises:
            RuntimeError: Host memory has no room for the copies; then nothing has changed.
        """
        names: list[str] = []
        parted: list[tuple[Any, Any, Any, Any]] = []
        for shared, address in zip(self.shared, self._addresses, strict=True):
            tensor = shared.table.get(shared.key)
            if tensor is None or tensor.data_ptr() != address:
                continue
            gradient = tensor.grad
            if gradient is not None and shared.gradient is not None and is_own(gradient, shared):
                names.append(shared.name)
                gradient = gradient.to("cpu", copy=True)
            parted.append((tensor, tensor.data.to("cpu", copy=True), gradient, tensor.device))
        for tensor, data, _, _ in parted:
            tensor.grad = None
            tensor.data = data
        self._parted = parted
        self.shared, self.trained, self.inputs, self.given, self._storages, self._leaves = [], (), {}, [], [], None
        self._read.clear()
        return names

    def settle(self) -> None:
        """Move the tensors of `part` to the device on which they were, and give them their gradients again.

        Raises:
            RuntimeError: The device has too little memory; then all of these tensors and gradients are in host memory.
        """
        parted, self._parted = self._parted, []
        try:
            moved = [(data.to(device), _on(device, gradient)) for _, data, gradient, device in parted]
        except RuntimeError as error:  # the kind of PyTorch's errors of too little memory
            for tensor, _, gradient, _ in parted:
                tensor.grad = _on("cpu", gradient)
            error.add_note(_IN_HOST_MEMORY)
            raise
        for (tensor, _, _, _), (data, gradient) in zip(parted, moved, strict=True):
            tensor.data, tensor.grad = data, gradient

    def take_gradients(self, names: Container[str]) -> None:
        """Move the gradients of these parameters into the plan's memory."""
        for shared in self.trained:
            if shared.name in names:
                shared.gradient.copy_(shared.tensor.grad)
                shared.tensor.grad = shared.given

    def _view(self, place: Place, tensor: Any) -> Any:
        view = torch.from_dlpack(self._module.shared(place))
        if view.dtype != tensor.dtype or view.numel() != tensor.numel():
            raise MbcError(
                "MBC330", f"'{place.value}' is {tensor.dtype}, but the plan keeps {view.dtype}",
                "keep the model in float32, and choose the type of activations by precision=",
            )  # fmt: skip
        return shaped(view, tensor)

    def _take(self, shared: Shared) -> None:
        shared.takes += 1
        shared.view.copy_(shared.tensor)
        owner = self._module.shared(shared.home)
        shared.lent = weakref.ref(owner)
        shared.tensor.data = shaped(torch.from_dlpack(owner), shared.view)


def _on(device: Any, gradient: Any) -> Any:
    """Return a gradient, which may be None, on a device."""
    return None if gradient is None else gradient.to(device)


def is_own(gradient: Any, shared: Shared) -> bool:
    """Return whether a gradient lies in the plan's memory for it."""
    return gradient.data_ptr() == shared.gradient.data_ptr()


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
