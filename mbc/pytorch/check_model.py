"""Compares a network with the PyTorch model that it was imported from: outputs, loss, gradients and statistics."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mbc.errors import MbcError
from mbc.interchange.check import (
    MOST_SECONDS,
    TOLERANCE,
    UNCHECKED,
    Numbers,
    Search,
    cannot_check,
    deviations,
    report_deviation,
    report_unchecked,
    seconds_of,
    step_of,
    training_graph,
)
from mbc.interchange.program import Array, Node
from mbc.interchange.pt2 import read_pt2
from mbc.interchange.steps import Imported
from mbc.interchange.write import Objective
from mbc.ir.graph import TrainingGraph
from mbc.pytorch.copies import copy_model
from mbc.pytorch.model_tensors import first_rows, output_tensors, rows_of
from mbc.pytorch.objective import judges_of
from mbc.pytorch.own_backward import checkpoints_opened, untouched
from mbc.pytorch.reference import Recorder, arguments_of, in_float64

torch: Any = importlib.import_module("torch")
_ROWS = 2
_VALUES = 8  # values of each channel that a batch norm should see; the variance of fewer may be near 0
_SEED = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """The network that is checked, with its losses.

    Attributes:
        network: The network that was imported.
        source: Its source.
        objectives: The losses of its outputs.
        judges: The losses as functions of PyTorch, in the same order.
        used: Positions of the model's inputs that the network reads.
    """

    network: Imported
    source: str
    objectives: Sequence[Objective | None]
    judges: Sequence[Callable[[Any, Any], Any] | None]
    used: Sequence[int]


def check_model(
    model: Any, example: Sequence[Any], subject: Subject, trained: set[int], check: bool | None, export: Any
) -> bool:
    """Compare a step of the network with a step of the model, in float64 on the CPU.

    Two samples of the example are used, or more if a batch norm would see too few values or the model accepts no other
    number. The model does not change, because a copy runs.

    Args:
        model: The model that was imported.
        example: Its inputs for a mini-batch.
        subject: The network and its losses.
        trained: The parameters that are trained, by `id`.
        check: False does not check; None checks only if it takes at most ten seconds; True checks in any case.
        export: Exports a copy of a model for an example, into a file.

    Returns:
        True if the check ran.

    Raises:
        MbcError: MBC345 for a deviation; MBC346 if `check` is True and nothing can be compared.
    """
    if check is False:
        return False
    batch = rows_of(example)
    failed: MbcError | None = None
    for rows in sorted({min(batch, _rows_wanted(subject.network)), batch}):
        try:
            graph = training_graph(subject.source, rows)
            if check is None and seconds_of(graph) > MOST_SECONDS:
                return False
            with untouched(model):
                _compare(model, first_rows(example, rows, "cpu"), graph, subject, trained, export)
            return True
        except MbcError as error:
            if error.code != UNCHECKED:
                raise
            failed = error
        except Exception as error:  # a model may raise anything in float64, on the CPU, or with other samples
            failed = cannot_check(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    if check and failed is not None:
        raise failed
    return False


def _compare(
    model: Any, example: Sequence[Any], graph: TrainingGraph, subject: Subject, trained: set[int], export: Any
) -> None:
    inputs = _varied([tensor.double() for tensor in example])
    targets = _targets(subject, graph.batch)
    theirs = _of_model(model, inputs, targets, subject, trained)
    deviation = next(deviations(_of_network(graph, inputs, targets, subject), theirs), None)
    if deviation is not None:
        report_deviation(deviation, _first(model, inputs, export))


def check_file(path: Path, network: Imported, source: str, loss: str) -> bool:
    """Compare a step of a network with a step of the exported program that it was imported from.

    PyTorch loads the file. The inputs are normal random numbers, with all samples of the program, whose sizes are
    fixed.

    Args:
        path: The exported program.
        network: The network that was imported from it.
        source: The network's source.
        loss: The loss of every output.

    Returns:
        True, because the check ran.

    Raises:
        MbcError: MBC345 for a deviation; MBC346 if nothing can be compared.
    """
    try:
        program = torch.export.load(path)
        read = read_pt2(path)
        used = [read.inputs.index(name) for name, _ in network.inputs]
        count = len(network.outputs)
        subject = Subject(network, source, [Objective(loss)] * count, judges_of([loss] * count), used)
        graph = training_graph(source, network.inputs[0][1][0])
        generator = torch.Generator().manual_seed(_SEED)
        shapes = [read.tensors[name].sizes for name in read.inputs]
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        targets = _targets(subject, graph.batch)
        arguments, parameters = arguments_of(program, [x.clone() for x in inputs])
        recorder = Recorder(program.graph_module)
        with untouched(), torch.enable_grad():
            outputs = _user_outputs(program, recorder.run(*arguments))
        theirs = _numbers(outputs, targets, subject, parameters, {})
        deviation = next(deviations(_of_network(graph, inputs, targets, subject), theirs), None)
        search = Search(read, recorder.tensors, [x.numpy() for x in inputs], True, TOLERANCE)
        place = None if deviation is None else search.first()
    except MbcError:
        raise
    except Exception as error:  # PyTorch may raise any exception for a program
        report_unchecked(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", cause=error)
    if deviation is not None:
        report_deviation(deviation, place)
    return True


def _user_outputs(program: Any, results: Any) -> tuple[Any, ...]:
    specs = program.graph_signature.output_specs
    pairs = zip(specs, results, strict=True)
    return tuple(r for spec, r in pairs if spec.kind.name == "USER_OUTPUT" and isinstance(r, torch.Tensor))


def _rows_wanted(network: Imported) -> int:
    """Return the number of samples for a check: two, or more if a batch norm has few values for each sample."""
    shapes = [network.shapes[step.values[0]] for step in network.steps if step.op == "bn"]
    values = min((int(np.prod(shape[2:], dtype=np.int64)) for shape in shapes), default=_VALUES)
    return max(_ROWS, -(-_VALUES // values))


def _varied(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs, with normal random numbers in place of constant inputs, which would hide errors."""
    generator = torch.Generator().manual_seed(_SEED)
    flat = [x.is_floating_point() and x.numel() > 1 and not bool((x != x.reshape(-1)[0]).any()) for x in inputs]
    return [
        torch.randn(x.shape, generator=generator, dtype=torch.float64) if constant else x
        for x, constant in zip(inputs, flat, strict=True)
    ]


def _targets(subject: Subject, rows: int) -> list[Array | None]:
    """Return random targets, one for each output that has a loss."""
    random = np.random.default_rng(_SEED)
    targets: list[Array | None] = []
    for value, objective in zip(subject.network.outputs, subject.objectives, strict=True):
        shape = (rows, *subject.network.shapes[value][1:])
        if objective is None:
            targets.append(None)
        elif objective.of_classes and objective.loss != "nll":
            targets.append(random.integers(0, shape[1], (rows, *shape[2:]), np.int64))
        elif objective.loss == "softmax_cross_entropy":
            shares = random.random(shape)
            targets.append(shares / shares.sum(1, keepdims=True))
        elif objective.loss == "binary_cross_entropy" or "sigmoid=true" in objective.settings:
            targets.append(random.random(shape))
        else:
            targets.append(random.standard_normal(shape))
    return targets


def _of_network(
    graph: TrainingGraph, inputs: Sequence[Any], targets: Sequence[Array | None], subject: Subject
) -> Numbers:
    given = [inputs[position].numpy() for position in subject.used]
    return step_of(graph, subject.network.arrays, [*given, *(t for t in targets if t is not None)])


def _of_model(
    model: Any, inputs: Sequence[Any], targets: Sequence[Array | None], subject: Subject, trained: set[int]
) -> Numbers:
    twin = copy_model(model, dtype=torch.float64)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.requires_grad_(own.requires_grad and id(own) in trained)
    with in_float64(), checkpoints_opened(), torch.inference_mode(False), torch.enable_grad():
        outputs = output_tensors(twin(*[x.clone() for x in inputs]))
        parameters = dict(twin.named_parameters(remove_duplicate=False))
        return _numbers(outputs, targets, subject, parameters, dict(twin.named_buffers()))


def _numbers(
    outputs: Sequence[Any],
    targets: Sequence[Array | None],
    subject: Subject,
    parameters: Mapping[str, Any],
    buffers: Mapping[str, Any],
) -> Numbers:
    """Return the results of a step of PyTorch, under the names and in the shapes of the network's states."""
    if len(outputs) != len(targets):
        return Numbers(tuple(o.detach().numpy() for o in outputs))
    losses: list[Any] = []
    for output, target, objective, judge in zip(outputs, targets, subject.objectives, subject.judges, strict=True):
        if judge is not None and objective is not None:
            losses.append(objective.weight * judge(output, torch.from_numpy(target)))
    loss = torch.stack(losses).sum()
    loss.backward()
    states = {key.name: key.state for key in subject.network.keys if key.state}
    gradients = {
        states[name]: parameter.grad.numpy()
        for name, parameter in parameters.items()
        if name in states and parameter.grad is not None
    }
    statistics = {
        states[name]: buffer.numpy() for name, buffer in buffers.items() if name in states and _is_statistic(name)
    }
    return Numbers(tuple(o.detach().numpy() for o in outputs), loss.item(), gradients, statistics)


def _is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


def _first(model: Any, inputs: Sequence[Any], export: Any) -> Node | None:
    """Return the first operation of the program of these samples whose result differs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        program = export(copy_model(model), tuple(x.float() for x in inputs), file)
        read = read_pt2(file)
    recorder = Recorder(program.graph_module)
    arguments, _ = arguments_of(program, [x.clone() for x in inputs])
    with torch.no_grad():
        recorder.run(*arguments)
    return Search(read, recorder.tensors, [x.numpy() for x in inputs], True, TOLERANCE).first()
