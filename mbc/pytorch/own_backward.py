"""Gradients that a model computes with its own code, which an exported program does not contain."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mbc.errors import MbcError
from mbc.interchange.refusal import LISTED
from mbc.pytorch.copies import copy_model
from mbc.pytorch.model_tensors import first_rows, rows_of, tensors_in

torch: Any = importlib.import_module("torch")
FakeTensorMode: Any = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
checkpoint: Any = importlib.import_module("torch.utils.checkpoint")
_ROWS = 2  # samples of the example in the first run


def check_backward(model: Any, example: Sequence[Any]) -> MbcError | None:
    """Raise MBC330 for a model that applies a `torch.autograd.Function`, whose backward pass mbc would not run.

    A copy of the model runs once with two samples of the example; then the autograd graph of its outputs is searched,
    including parts that PyTorch checkpoints. The copy's tensors and the samples have shapes without numbers, so that
    large volumes take hardly any time and memory. A model whose operations depend on numbers runs with numbers. A model
    that does not run with two samples runs with all of them.

    Returns:
        The error if the model does not run with all samples, either; otherwise None.

    Raises:
        MbcError: MBC330.
    """
    device = next((str(tensor.device) for tensor in (*model.parameters(), *model.buffers())), "cpu")
    batch = rows_of(example)
    failed: MbcError | None = None
    for rows in sorted({min(_ROWS, batch), batch}):
        try:
            inputs = first_rows(example, rows, device)
            shapes = FakeTensorMode(allow_non_fake_inputs=True)
            try:
                walk = _walked(model, list(map(shapes.from_tensor, inputs)), device, shapes)
            except MbcError:
                raise
            except Exception:  # it reads numbers, or has operations without a rule for shapes
                walk = _walked(model, inputs, device)
        except MbcError:
            raise
        except Exception as error:  # a model may raise anything, perhaps because it expects the whole mini-batch
            first = str(error).strip().partition("\n")[0]
            reason = f"the model cannot be called with the example: {first}"
            failed = MbcError("MBC330", reason, "change the model or the example so that model(example) succeeds")
        else:
            walk.check()
            return None
    return failed


def _walked(model: Any, inputs: Sequence[Any], device: str, shapes: Any = None) -> _Walk:
    """Return the graph of a run of a copy of a model, which has numbers unless a `FakeTensorMode` is given.

    The model does not run within that mode: tensors that it makes itself have numbers, and it may keep them in a cache.
    """
    walk = _Walk()
    with untouched(model), checkpoints_opened(_refuse_detached), _emptied_cache(device), without_log():
        walk.run(copy_model(model, device, shapes=shapes), inputs)
    return walk


@contextmanager
def without_log() -> Generator[None]:
    """Keep PyTorch from logging the traceback of an error that it also raises."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _emptied_cache(device: str) -> Generator[None]:
    """Return GPU memory that PyTorch caches to the GPU, because mbc takes its memory from the GPU itself."""
    try:
        yield
    finally:
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def untouched(model: Any = None) -> Generator[None]:
    """Restore what a run may change: random number generators, and buffers and gradients of a model.

    A copy of the model runs, but functions that its modules hold may refer to the model itself.
    """
    parameters = [] if model is None else list(model.parameters())
    buffers = [] if model is None else list(model.buffers())
    held = [(buffer, buffer.detach().clone()) for buffer in buffers]
    gradients = [parameter.grad for parameter in parameters]
    python, numpy = random.getstate(), np.random.get_state()
    devices = {str(tensor.device) for tensor in (*parameters, *buffers) if tensor.is_cuda}
    with torch.random.fork_rng(sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in held:
                    if not torch.equal(
                        buffer, before
                    ):  # PyTorch does not count a batch norm's changes of its statistics as a new version
                        buffer.copy_(before)


@contextmanager
def checkpoints_opened(look: Any = None) -> Generator[None]:
    """Run the functions in `torch.utils.checkpoint` without checkpointing, so that their operations are in the graph.

    The form with `use_reentrant=True` hides its operations in an `autograd.Function`; `look` is called with the inputs
    of each such function. The form with `use_reentrant=False` runs its function a second time in the backward pass,
    which would change the statistics of batch norms a second time.
    """

    def run(function: Any, _: bool, *inputs: Any) -> Any:
        if look is not None:
            look(inputs)
        return function(*inputs)

    def once(*_: Any) -> Generator[None]:
        yield

    checkpoint.CheckpointFunction.apply = staticmethod(run)
    kept, checkpoint._checkpoint_without_reentrant_generator = checkpoint._checkpoint_without_reentrant_generator, once
    try:
        yield
    finally:
        del checkpoint.CheckpointFunction.apply
        checkpoint._checkpoint_without_reentrant_generator = kept


def _refuse_detached(inputs: Sequence[Any]) -> None:
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return
    raise MbcError(
        "MBC330",
        "torch.utils.checkpoint with use_reentrant=True has no input that needs a gradient, so that torch trains"
        " no parameter inside of it",
        "pass use_reentrant=False, with which they are trained, or leave this checkpoint out",
    )


class _Walk:
    """Runs a model, and labels each node of a custom function with the innermost module that created it."""

    def __init__(self) -> None:
        self._made_in: dict[Any, str] = {}
        self._outputs: list[Any] = []

    def run(self, model: Any, inputs: Sequence[Any]) -> None:
        """Run a model and keep the graph of its outputs."""
        handles = [module.register_forward_hook(self._after(path)) for path, module in model.named_modules()]
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._outputs = tensors_in(model(*inputs))
        finally:
            for handle in handles:  # a handle would keep the model alive
                handle.remove()

    def check(self) -> None:
        """Raise MBC330 with every custom function that an output depends on.

        Raises:
            MbcError: MBC330.
        """
        kept = {node for node in nodes_of(self._outputs, set()) if _is_custom(node)}
        named: dict[str, list[str]] = {}
        for node, path in self._made_in.items():
            if node in kept:
                places = named.setdefault(_name(node), [])
                if path not in places:
                    places.append(path)
        if named:
            listed = "; ".join(f"{name} in {_places(paths)}" for name, paths in named.items())
            raise MbcError(
                "MBC330",
                f"the model applies a torch.autograd.Function, whose own backward mbc would not run: {listed}",
                f"compute it with layers that mbc supports, whose gradients are PyTorch's ({LISTED}); or train the"
                " model in PyTorch",
            )

    def _after(self, path: str) -> Any:
        def label(_: Any, inputs: Any, output: Any) -> None:
            before = {tensor.grad_fn for tensor in tensors_in(inputs)}
            for node in nodes_of(tensors_in(output), before):
                if _is_custom(node):
                    self._made_in.setdefault(node, path)  # inner modules end before outer modules

        return label


def nodes_of(tensors: Sequence[Any], seen: set[Any]) -> list[Any]:
    """Return the nodes that tensors depend on and that are not in `seen`, and add them to `seen`."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    reached: list[Any] = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        reached.append(node)
        waiting += [other for other, _ in node.next_functions if other is not None]
    return reached


def _is_custom(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _name(node: Any) -> str:
    function: Any = getattr(node, "_forward_cls", node.__class__)
    return f"{function.__module__}.{function.__qualname__}"


def _places(paths: Sequence[str]) -> str:
    shown = [f"'{path}'" if path else "the model itself" for path in paths[:4]]
    return ", ".join(shown) + (f" and {len(paths) - 4} more modules" if len(paths) > 4 else "")
