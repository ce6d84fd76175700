"""Compares an imported network with its ONNX file, which the package's reference evaluator runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mbc.errors import MbcError
from mbc.interchange.check import (
    MOST_SECONDS,
    Numbers,
    Search,
    deviations,
    evaluation_of,
    report_deviation,
    report_unchecked,
    seconds_of,
    step_of,
    training_graph,
)
from mbc.interchange.from_onnx.evaluator import first_misread
from mbc.interchange.from_onnx.package import onnx
from mbc.interchange.from_onnx.read import read_onnx
from mbc.interchange.program import Array
from mbc.interchange.refusal import printable
from mbc.interchange.steps import Imported
from mbc.ir.graph import TrainingGraph

TOLERANCE = 1e-4  # relative, for the float32 of a file
_DRAWS = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
_SLOWER = 20  # estimated time of the reference evaluator, divided by the interpreter's


def check_onnx(path: Path, batch: int | None, network: Imported, source: str, check: bool | None) -> bool:
    """Compare the outputs of a network with those of the ONNX file that it was imported from.

    A file has no loss and no gradients. The check runs it as it is: in evaluation mode, or in training mode if its
    batch norms are in training mode.

    Args:
        path: The ONNX file.
        batch: Samples of a mini-batch, if the file leaves them open.
        network: The imported network.
        source: The source text of the network.
        check: True to check in any case; None to check only if the check takes at most ten seconds.

    Returns:
        True if the check ran; False if it was left out.

    Raises:
        MbcError: MBC345 for a deviation; MBC346 if `check` is True and the file cannot be run.
    """
    graph = training_graph(source, network.inputs[0][1][0])
    if check is None and _SLOWER * seconds_of(graph) > MOST_SECONDS:
        return False
    try:
        model = onnx().load(str(path))
        training = _is_training(model)
        program = read_onnx(path, batch)
        ranks = {
            str(n): len(program.tensors[printable(n)].shape)
            for n in _values_of(model)
            if printable(n) in program.tensors
        }
        if operator := first_misread(model, ranks):
            report_unchecked(f"ONNX's evaluator does not compute {operator} as ONNX defines it", "leave the check out")
        random = np.random.default_rng(0)
        given = {name: random.standard_normal(program.tensors[name].sizes) for name in program.inputs}
        wanted = _tensors_of(model, given)
    except MbcError:
        if check is None:
            return False
        raise
    except Exception as error:  # the evaluator may raise any exception
        if check is None:
            return False
        report_unchecked(f"{type(error).__name__}: {printable(str(error))}", cause=error)
    inputs = [given[name] for name, _ in network.inputs]
    ours = _of_network(graph, network, inputs, training)
    theirs = Numbers(tuple(wanted[name] for name in program.outputs))
    deviation = next(deviations(ours, theirs, TOLERANCE), None)
    if deviation is not None:
        ordered = [given[name] for name in program.inputs]
        report_deviation(deviation, Search(program, wanted, ordered, training, TOLERANCE).first())
    return True


def _of_network(graph: TrainingGraph, network: Imported, inputs: Sequence[Array], training: bool) -> Numbers:
    if not training:
        return evaluation_of(graph, network.arrays, inputs)
    targets = [np.zeros(graph.values[name].type.shape) for name in graph.inputs[len(inputs) :]]
    return Numbers(step_of(graph, network.arrays, [*inputs, *targets]).outputs)


def _tensors_of(model: Any, given: Mapping[str, Array]) -> dict[str, Array]:
    """Return all floating-point tensors of a file, by their names in the program."""
    evaluator = onnx("onnx.reference").ReferenceEvaluator(model)
    names = {printable(value.name): value.name for value in model.graph.input}
    feeds = {names[name]: array.astype(np.float32) for name, array in given.items()}
    with np.errstate(all="ignore"):
        results: Mapping[str, Any] = evaluator.run(None, feeds, intermediate=True)
    return {printable(name): a for name, a in results.items() if getattr(getattr(a, "dtype", None), "kind", "") == "f"}


def _values_of(model: Any) -> list[str]:
    return [str(name) for node in model.graph.node for name in node.input]


def _is_training(model: Any) -> bool:
    """Return whether the batch norms of a file are in training mode.

    Raises:
        MbcError: MBC346 if the batch norms differ in mode, or random numbers are drawn.
    """
    modes: set[bool] = set()
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in _DRAWS:
            report_unchecked(f"its {node.op_type} draws random numbers", "export it in evaluation mode to check it")
        if node.op_type == "BatchNormalization":
            modes.add(any(a.name == "training_mode" and a.i for a in node.attribute))
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            mode = constants.get(node.input[2])
            if mode is None or bool(onnx("onnx.numpy_helper").to_array(mode)):
                report_unchecked("its dropout draws random numbers", "export it in evaluation mode to check it")
    if len(modes) > 1:
        report_unchecked("some of its batch norms are in training mode, and some are not")
    return True in modes
