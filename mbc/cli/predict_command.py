"""The command `mbc predict`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from mbc.cli.arguments.shared import options
from mbc.cli.import_command import check_free
from mbc.cli.subject import check_plannable, package_for_training
from mbc.cli.terminal import notes
from mbc.ops.base import Array
from mbc.progress import busy
from mbc.runtime.checkpoint import Checkpoint
from mbc.runtime.module import Module
from mbc.runtime.sliding_window import SIGMOID, SOFTMAX, Windows, head_of
from mbc.train.accuracy import inputs_of
from mbc.train.cases import case_files, open_case
from mbc.train.volumes import write_array


def run(arguments: argparse.Namespace) -> int:
    """Predict every file, write the results, and print their names.

    All files are opened and checked before the first one is predicted.
    """
    subject, device, data = arguments.network_or_package, arguments.device, Path(arguments.data)
    check_plannable(subject, options(arguments))
    Checkpoint(Path(arguments.weights))  # check the file before anything is planned
    with notes():
        net = Module(package_for_training(subject, options(arguments), device, None), device=device)
    net.load(arguments.weights, weights_only=True)
    graph = net.plan.graph
    _, activation = head_of(graph)
    inputs = [i for i in inputs_of(graph) if i.name == graph.infer_inputs[0]]
    files = case_files(data, inputs[0], inputs, "test")
    endings = {name: path.name.removeprefix(name).removeprefix("_0000") for name, path in files.items()}
    targets = {name: Path(arguments.output) / f"{name}{ending}" for name, ending in endings.items()}
    for name, target in targets.items():  # not even --force replaces the data
        check_free(target, arguments.force and target.resolve() != files[name].resolve())
    windows = Windows(arguments.overlap, arguments.weighting, tuple(map(int, arguments.mirror)), arguments.average)
    volumes = [open_case(name, [files], inputs).volumes[0] for name in files]
    for volume, target in zip(volumes, targets.values(), strict=True):
        with busy(f"predicting {volume.path}"):
            images = volume.read() if volume.rows is not None else volume.read()[None]
            parts = (images[start : start + net.batch] for start in range(0, len(images), net.batch))
            results = [_finished(net.predict(part, windows), activation, arguments.probabilities) for part in parts]
        result = np.concatenate(results) if volume.rows is not None else results[0][0]
        write_array(target, result, len(volume.size), volume.path)
    outputs = {name: str(path) for name, path in targets.items()}
    print(json.dumps({"outputs": outputs}, indent=2) if arguments.json else "\n".join(outputs.values()))
    return 0


def _finished(values: Array, activation: str, probabilities: bool) -> Array:
    """Return class numbers, or where regions are, unless probabilities are asked for; other values as they are."""
    if activation == SOFTMAX and not probabilities:
        return values.argmax(axis=1).astype(np.uint8 if values.shape[1] <= 256 else np.int32)
    return (values > 0.5).astype(np.uint8) if activation == SIGMOID and not probabilities else values
