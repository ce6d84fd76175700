"""Comparison of an exported model with PyTorch in fp64.

The model that `mbc import` reads is run in fp64 on the interpreter. Every output, the loss, every gradient
and every running statistic of a step is compared.
"""

from __future__ import annotations

import copy
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from modules import module_gradients, open_module, set_states
from torch.overrides import TorchFunctionMode  # pyright: ignore[reportMissingImports]

from mbc.compiler import compile_plan
from mbc.errors import BudgetError, MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.interchange.aten import constants
from mbc.interchange.importing import ImportedModel, check_source, import_model
from mbc.interchange.pt2 import read_pt2
from mbc.interchange.translate import translate
from mbc.interchange.write import write_source
from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Precision
from mbc.ops.base import Array
from mbc.options import Options
from mbc.passes.training_step import differentiate
from mbc.pytorch.objective import fitted, losses_of
from mbc.pytorch.targets import target_of
from mbc.source import Source
from tests.ir.execution import draw, execute, numpy_type, parameter_gradients, step, types_of

TOLERANCE = 1e-9
FP32_TOLERANCE = 1e-5  # of results that depend on constants rounded to fp32
# A gradient whose norm is below this part of the largest one is compared relative to that part: it may be nothing but
# the rounding of larger numbers, such as that of a bias before a batch norm.
SMALL_PART = 1e-3
LOSSES = {"softmax_cross_entropy": torch.nn.functional.cross_entropy, "mse": torch.nn.functional.mse_loss}
REFUSALS = ("MBC303", "MBC331")  # of a model, and of a loss
_REFUSED = re.compile(r": ((?:aten|higher_order|onnx|_operator)\.[\w.]+|the program): ")


@dataclass(frozen=True)
class Verdict:
    """The result of comparing one model.

    Attributes:
        kind: `equal`, `different`, `refused` (MBC303, MBC331), the code of another error of mbc, `traceback`,
            `not exported` where PyTorch itself fails, or `not finite` where PyTorch's own loss is not finite.
        detail: The message of the error or refusal.
        refused: The operations that a refusal names.
        operations: The model's operations, one by one.
    """

    kind: str
    detail: str = ""
    refused: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()


class _Different(Exception):
    """Raised for a result of mbc that differs from PyTorch's."""


@dataclass(frozen=True)
class Judge:
    """A loss of torch that compares the only output of a model with a target; it holds the target."""

    loss: Any
    target: Any

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss in fp64."""
        return copy.deepcopy(self.loss).double()(output, target)

    @property
    def read(self) -> Array:
        """Return the target in the form that a step of mbc takes."""
        (objective,) = losses_of(self.loss)
        return np.asarray(target_of(objective, self.loss, self.target).read(self.target)) if objective else self.target


class ExactSixths(TorchFunctionMode):
    """Compute hardsigmoid by its definition. In fp64 PyTorch's own gradient uses 1 / 6 in float32, an error of 3e-8."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a hard sigmoid with exact sixths, and any other function as PyTorch does."""
        if func is torch.nn.functional.hardsigmoid and args[0].dtype == torch.float64:
            return torch.nn.functional.relu6(args[0] + 3) / 6
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Reference:
    """The results of PyTorch in fp64.

    These are the outputs in evaluation mode, the outputs of a step, its loss, the gradients by the names of parameters
    (None: the parameter has no gradient), and the buffers after the step.
    """

    evaluated: tuple[Array, ...]
    outputs: tuple[Array, ...]
    loss: float
    gradients: Mapping[str, Array | None]
    buffers: Mapping[str, Array]
    targets: tuple[Array, ...]


def stirred(model: Any) -> Any:
    """Return the model with random scales, offsets and statistics in place of the 0 and 1 of a new module."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dtype == torch.float32 and tensor.ndim <= 1:
                tensor.uniform_(0.5 if "running_var" in name else -0.4, 1.3, generator=generator)
    return model


def tensors_of(given: Any) -> tuple[Any, ...]:
    """Return the tensors of an output, in order."""
    if isinstance(given, Mapping):
        given = tuple(given.values())
    if isinstance(given, (tuple, list)):
        return tuple(tensor for item in given for tensor in tensors_of(item))
    return (given,) if isinstance(given, torch.Tensor) else ()


def reference(model: Any, inputs: Sequence[Any], loss: str | Judge, noise: float = 0.0) -> Reference:
    """Run a step of the model in fp64. `noise` is the relative change of weights and inputs."""
    twin = copy.deepcopy(model).double().train()
    given = [x.detach().double() if x.is_floating_point() else x for x in inputs]
    if noise:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in (*given, *twin.parameters()):
                if tensor.is_floating_point():
                    tensor.mul_(1 + noise * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    with ExactSixths():
        with torch.no_grad():
            evaluated = tensors_of(copy.deepcopy(twin).eval()(*[x.clone() for x in given]))
        outputs = tensors_of(twin(*[x.clone() for x in given]))
        floating = [output for output in outputs if output.is_floating_point()]
        targets = [_target(output, loss) for output in floating]
        judged = LOSSES[loss] if isinstance(loss, str) else loss
        total: Any = sum(judged(o, t) for o, t in zip(floating, targets, strict=True))
        assert isinstance(total, torch.Tensor)
        total.backward()
    return Reference(
        tuple(x.numpy() for x in evaluated),
        tuple(x.detach().numpy() for x in outputs),
        total.item(),
        {n: None if p.grad is None else p.grad.numpy() for n, p in twin.named_parameters(remove_duplicate=False)},
        {n: b.detach().numpy() for n, b in twin.named_buffers(remove_duplicate=False)},
        tuple(t.numpy() for t in targets) if isinstance(loss, str) else (loss.read,),
    )


def _target(output: Any, loss: str | Judge) -> Any:
    if not isinstance(loss, str):
        return loss.target.double() if loss.target.is_floating_point() else loss.target
    # Outputs of one shape have one target.
    generator = torch.Generator().manual_seed(7)
    if loss == "mse":
        return torch.randn(output.shape, generator=generator).double()
    return torch.randint(0, output.shape[1], (output.shape[0], *output.shape[2:]), generator=generator)


def exported(model: Any, inputs: Sequence[Any], path: Path) -> tuple[str, ...]:
    """Export and save the model as a user does, and return its operations one by one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(copy.deepcopy(model).train(), tuple(inputs), strict=False)
        torch.export.save(program, path)
    modules = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    nodes = [node for module in modules for node in module.graph.nodes if node.op == "call_function"]
    return tuple(str(node.target) for node in nodes if str(node.target).startswith("aten."))


def imported(path: Path, loss: str | Judge) -> ImportedModel:
    """Import a file, with the loss summed over all its outputs."""
    if isinstance(loss, str):
        return import_model(path, "drawn", loss)
    network = translate(read_pt2(path), "drawn")
    targets = fitted(losses_of(loss.loss), loss.loss, network, loss.target)
    source = write_source(network, [None if target is None else target.objective for target in targets], "drawn")
    check_source(source, network)
    return ImportedModel(network, source)


def judge(
    model: Any, inputs: Sequence[Any], loss: str | Judge, expected: Reference | None = None, planned: str = ""
) -> Verdict:
    """Export, import and compare a model.

    If `planned` is a seed, the step is also computed by a plan within a random memory budget.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        try:
            operations = exported(model, inputs, path)
        except Exception as error:
            return Verdict("not exported", f"{type(error).__name__}: {error}"[:300])
        try:
            created = imported(path, loss)
            expected = expected or reference(model, inputs, loss)
            if not np.isfinite(expected.loss):
                return Verdict("not finite", f"PyTorch's loss is {expected.loss}", (), operations)
            created = _compared(created, path, loss, inputs, expected)
            if planned:
                compare_plan(created, inputs, expected, planned)
            return Verdict("equal", "", (), operations)
        except _Different as error:
            return Verdict("different", str(error), (), operations)
        except MbcError as error:
            kind = "refused" if error.code in REFUSALS else error.code
            named = tuple(dict.fromkeys(_REFUSED.findall(str(error))))
            return Verdict(kind, str(error)[:2000], named, operations)
        except Exception as error:
            lines = traceback.format_exc().splitlines()
            return Verdict(
                "traceback", "\n".join([f"{type(error).__name__}: {error}"[:300], *lines[-7:]]), (), operations
            )


def _compared(
    imported_model: ImportedModel, path: Path, loss: str | Judge, inputs: Sequence[Any], expected: Reference
) -> ImportedModel:
    """Compare an imported model, and return the import that agrees with PyTorch within `TOLERANCE`.

    An import computes constants in fp32, as the model does, and the twin in fp64. Where that makes a difference, the
    model is imported again with constants in fp64, and the first import need only agree within fp32's rounding.
    """
    try:
        _compare(imported_model, inputs, expected, TOLERANCE)
    except _Different:
        with mock.patch.object(constants, "NUMPY", {**constants.NUMPY, "float32": np.dtype(np.float64)}):
            exact = imported(path, loss)
        if exact.source == imported_model.source and _same_arrays(exact.network.arrays, imported_model.network.arrays):
            raise
        _compare(exact, inputs, expected, TOLERANCE)
        _compare(imported_model, inputs, expected, FP32_TOLERANCE)
        return exact
    return imported_model


def _same_arrays(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _compare(imported_model: ImportedModel, inputs: Sequence[Any], expected: Reference, tolerance: float) -> None:
    """Raise `_Different` if a result of the imported model differs from PyTorch's."""
    settings = (("train.precision", "fp64"),)
    lowered = lower(parse(Source("imported", imported_model.source)), settings)
    graph = differentiate(lowered.network, lowered.optimizer, Precision.FP64)
    given = given_arrays(graph, imported_model, inputs, expected)
    held = {n: v for n, v in given.items() if n in graph.values}
    inferred = execute(graph.infer, types_of(graph), held, graph.batch, Precision.FP64)
    if len(graph.outputs) != len(expected.outputs):
        raise _Different(f"it has {len(graph.outputs)} outputs, PyTorch's {len(expected.outputs)}")
    for number, (name, wanted) in enumerate(zip(graph.infer_outputs, expected.evaluated, strict=True)):
        expect(f"output {number} in evaluation mode", inferred[name], wanted, tolerance=tolerance)
    env = step(graph, held)
    for number, (name, wanted) in enumerate(zip(graph.outputs, expected.outputs, strict=True)):
        expect(f"output {number}", env[name], wanted, tolerance=tolerance)
    expect("the loss", np.asarray(env[graph.loss]).reshape(()), np.asarray(expected.loss), tolerance=tolerance)
    compare_gradients(imported_model, parameter_gradients(graph, env), expected, tolerance)
    after = dict(graph.updates)
    for key in imported_model.network.keys:
        if key.state in after and key.name in expected.buffers:
            wanted = expected.buffers[key.name]
            expect(
                f"the buffer '{key.name}' after the step",
                env[after[key.state]].reshape(wanted.shape),
                wanted,
                tolerance=tolerance,
            )


def given_arrays(
    graph: TrainingGraph, imported_model: ImportedModel, inputs: Sequence[Any], expected: Reference
) -> dict[str, Array]:
    """Return the values with which a step begins: inputs, targets, parameters, and the states of a new optimizer."""
    given = draw(graph, np.random.default_rng(0))
    given |= {name: array * 0 for name, array in given.items() if name not in graph.inputs}
    given |= dict(imported_model.network.arrays)
    count = len(imported_model.network.inputs)
    own = {f"x{n}" if n else "x": x for n, x in enumerate(inputs)}
    named = [own.get(name) for name, _ in imported_model.network.inputs]
    values = [x if x is not None else inputs[n] for n, x in enumerate(named)]
    given |= {name: x.numpy() for name, x in zip(graph.inputs[:count], values, strict=True)}
    by_shape = {target.shape: target for target in expected.targets}
    for name in graph.inputs[count:]:
        given[name] = by_shape[graph.values[name].type.shape]
    return {n: np.ascontiguousarray(a).astype(numpy_type(graph.values[n].type.dtype)) for n, a in given.items()}


def compare_gradients(
    imported_model: ImportedModel, ours: Mapping[str, Array], expected: Reference, tolerance: float = TOLERANCE
) -> None:
    """Raise `_Different` if the gradient of a parameter differs, or if there is none although PyTorch has one."""
    trained = {n: g for n, g in expected.gradients.items() if g is not None}
    largest = max((float(np.linalg.norm(g)) for g in trained.values()), default=0.0)
    states = {key.name: key.state for key in imported_model.network.keys}
    for name, wanted in expected.gradients.items():
        state = states.get(name, "")
        if state in ours:
            wanted = np.zeros(ours[state].shape) if wanted is None else wanted
            expect(f"the gradient of '{name}'", ours[state].reshape(wanted.shape), wanted, largest, tolerance)
        elif wanted is not None:
            expect(
                f"the gradient of '{name}', which is not trained,", np.zeros_like(wanted), wanted, largest, tolerance
            )


def expect(what: str, ours: Array, wanted: Array, scale: float = 0.0, tolerance: float = TOLERANCE) -> None:
    """Raise `_Different` if the arrays differ by more than the tolerance, relative to the norm of `wanted`."""
    if ours.shape != wanted.shape:
        raise _Different(f"{what} has the shape {list(ours.shape)}, PyTorch's {list(wanted.shape)}")
    distance = float(np.linalg.norm(np.asarray(ours, np.float64) - wanted))
    norm = max(float(np.linalg.norm(wanted)), SMALL_PART * scale)
    if not distance <= tolerance * norm + 1e-300:
        raise _Different(f"{what} differs by {distance / (norm or 1.0):.1e} relative to PyTorch's norm {norm:.3g}")


def compare_plan(imported_model: ImportedModel, inputs: Sequence[Any], expected: Reference, seed: str) -> str:
    """Step a plan within a random memory budget, compare it with PyTorch, and say which plan was made.

    The step runs on the CPU; the loss and the gradients are compared.
    """
    drawn = random.Random(seed)
    gpu = drawn.choice(("h100", "a100-40", "t4"))
    settings = (("train.precision", "fp64"), ("train.optimizer", "sgd(momentum=0.9)"))
    source = Source("imported", imported_model.source)
    lowered = lower(parse(source), settings)
    plan = compile_plan(source, Options(gpu=gpu, settings=settings))
    floor, arena = plan.bounds.floor_bytes, plan.predictions.arena_bytes
    budget = plan.predictions.overhead_bytes + floor + int((arena - floor) * drawn.uniform(0, 1.05))
    limited = (*settings, ("memory.device", f"{budget}B"))
    try:
        plan = compile_plan(source, Options(gpu=gpu, settings=limited))
        which = "within a budget"
    except BudgetError:
        which = "without a limit"
    graph = differentiate(lowered.network, lowered.optimizer, Precision.FP64)
    given = given_arrays(graph, imported_model, inputs, expected)
    module = open_module(plan, "cpu")
    try:
        set_states(module, {n: a for n, a in imported_model.network.arrays.items() if n in module.states})
        arrays = [given[name] for name in graph.inputs]
        loss, gradients, _ = module_gradients(module, lowered.network, lowered.optimizer, arrays)
    finally:
        module.close()
    expect("the loss of the plan", np.asarray(loss), np.asarray(expected.loss))
    trained = parameter_names(graph)
    compare_gradients(imported_model, {n: g for n, g in gradients.items() if n in trained}, expected)
    return which


def parameter_names(graph: TrainingGraph) -> set[str]:
    """Return the names of the parameters."""
    return {op.inputs[0] for op in graph.train if op.kind in ("sgd_update", "adamw_update")}
