"""The command `mbc predict`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mbc.cli.arguments.shared import options
from mbc.cli.import_command import check_free
from mbc.cli.subject import check_plannable, package_for_training
from mbc.cli.terminal import notes
from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.ops.base import Array
from mbc.progress import busy
from mbc.runtime.checkpoint import Checkpoint
from mbc.runtime.module import Module
from mbc.runtime.sliding_window import SIGMOID, SOFTMAX, Windows, head_of
from mbc.train.accuracy import inputs_of
from mbc.train.cases import case_files, open_case
from mbc.train.evaluation import dice_scores, mean_score
from mbc.train.inputs import Input
from mbc.train.volumes import write_array


def run(arguments: argparse.Namespace) -> int:
    """Predict every file, write the results, and print their names, and the Dice scores if labels are given.

    All files are opened, and all labels checked, before the first file is predicted.
    """
    subject, device = arguments.network_or_package, arguments.device
    places = [Path(place) for place in (arguments.data, arguments.labels) if place is not None]
    check_plannable(subject, options(arguments))
    Checkpoint(Path(arguments.weights))  # check the file before anything is planned
    with notes():
        net = Module(package_for_training(subject, options(arguments), device, None), device=device)
    net.load(arguments.weights, weights_only=True)
    inputs = _used_inputs(net.plan.graph, arguments.labels is not None)
    files = [case_files(place, i, inputs, "test") for place, i in zip(places, inputs, strict=True)]
    if not any(place.is_dir() for place in places):  # two files may have unlike names
        files = [dict(zip(files[0], one.values(), strict=True)) for one in files]
    endings = {name: path.name.removeprefix(name).removeprefix("_0000") for name, path in files[0].items()}
    targets = {name: Path(arguments.output) / f"{name}{ending}" for name, ending in endings.items()}
    for name, target in targets.items():  # not even --force replaces the data
        sources = [one[name].resolve() for one in files if name in one]
        check_free(target, arguments.force and target.resolve() not in sources)
    windows = Windows(arguments.overlap, arguments.weighting, tuple(map(int, arguments.mirror)), arguments.average)
    cases = [open_case(name, files, inputs) for name in targets]
    scores: list[tuple[float | None, ...]] = []
    for case, target in zip(cases, targets.values(), strict=True):
        volume, written, classes = case.volumes[0], list[Array](), list[Array]()
        with busy(f"predicting {volume.path}"):
            images = volume.read() if volume.rows is not None else volume.read()[None]
            for start in range(0, len(images), net.batch):
                values = net.predict(images[start : start + net.batch], windows)
                classes.append(_classes(values, head_of(net.plan.graph)[1]))
                written.append(values if arguments.probabilities else classes[-1])
        if len(inputs) > 1:
            numbers = np.concatenate(classes)
            scores.append(dice_scores(numbers, case.volumes[1].read().reshape(numbers.shape), inputs[1]))
        result = np.concatenate(written) if volume.rows is not None else written[0][0]
        write_array(target, result, len(volume.size), volume.path)
    _print_report(targets, scores, arguments.json)
    return 0


def _used_inputs(graph: TrainingGraph, labelled: bool) -> list[Input]:
    """Return the input that is predicted and, if labels are given, the input with which a loss compares the output.

    Raises:
        MbcError: MBC387 if the network predicts no class numbers.
    """
    output, activation = head_of(graph)
    image = [i for i in inputs_of(graph) if i.name == graph.infer_inputs[0]]
    size = graph.values[output].type.shape[2:]
    labels = [i for i in inputs_of(graph) if i.classes is not None and i.type.shape[1:] == size]
    if labelled and not (labels and activation == SOFTMAX):
        message = f"network '{graph.name}' predicts no class numbers that could be compared with labels"
        raise MbcError("MBC387", message, "leave --labels out")
    return [*image, labels[0]] if labelled else image


def _classes(values: Array, activation: str) -> Array:
    """Return class numbers of probabilities, where regions are, or other values as they are."""
    if activation == SOFTMAX:
        return values.argmax(axis=1).astype(np.uint8 if values.shape[1] <= 256 else np.int32)
    return (values > 0.5).astype(np.uint8) if activation == SIGMOID else values


def _print_report(targets: Mapping[str, Path], scores: Sequence[tuple[float | None, ...]], as_json: bool) -> None:
    """Print the written files, and the Dice scores: means over the files in which a class is."""
    means = [mean_score(column) for column in zip(*scores, strict=True)]
    mean = mean_score(means[1:])
    if as_json:
        rows = scores or [None] * len(targets)
        cases = {name: {"output": str(targets[name]), "dice": row} for name, row in zip(targets, rows, strict=True)}
        print(json.dumps({"cases": cases, "dice": means, "mean_dice": mean}, indent=2))
        return
    print("\n".join(map(str, targets.values())))
    if scores:
        shown = ["none" if x is None else f"{x:.4f}" for x in (*means, mean)]
        print("class  Dice", *(f"{number:5}  {text}" for number, text in enumerate(shown[:-1])), sep="\n")
        print(f"mean of the classes from 1: {shown[-1]}")
