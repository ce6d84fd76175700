"""ONNX files made by hand or by torch, and the results of networks that were imported from them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.interchange.importing import ImportedModel, import_model
from tests.interchange.models import Model, Tensor, forward, stirred, torch

onnx: Any = pytest.importorskip("onnx", reason="files of ONNX need the package onnx, an extra")
reference: Any = pytest.importorskip("onnx.reference")
helper, numbers = onnx.helper, onnx.numpy_helper
FLOAT = onnx.TensorProto.FLOAT


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    return helper.make_node(kind, list(inputs), list(outputs), name=attributes.pop("name", f"the_{kind}"), **attributes)


def model(
    nodes: Sequence[Any],
    held: Mapping[str, Any] | None = None,
    shape: Sequence[int | str] = (2, 3, 8, 8),
    output: str = "y",
    opset: int = 20,
    kind: int = FLOAT,
) -> Any:
    """Return a graph from `x` to `y`."""
    arrays = [numbers.from_array(np.asarray(a), name) for name, a in (held or {}).items()]
    inputs = [helper.make_tensor_value_info("x", kind, list(shape))]
    outputs = [helper.make_tensor_value_info(output, FLOAT, None)]
    graph = helper.make_graph(list(nodes), "net", inputs, outputs, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def written(path: Path, content: Any) -> Path:
    file = path / "model.onnx"
    file.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
    return file


def exported(path: Path, network: Model, *inputs: Tensor, train: bool = True, **options: Any) -> Path:
    """Export a network by torch without ONNX Script. In training mode no operations are folded."""
    file = path / "model.onnx"
    mode = torch.onnx.TrainingMode.TRAINING if train else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.train(train), inputs, file, dynamo=False, training=mode, do_constant_folding=not train, **options
        )
    return file


def compared(path: Path, network: Model, *inputs: Tensor, **options: Any) -> ImportedModel:
    """Export by torch, import, and assert that evaluation results are equal within 1e-5."""
    network = stirred(network)
    imported = import_model(exported(path, network, *inputs, **options), "net", "mse")
    with torch.no_grad():
        wanted = network.eval()(*inputs).numpy()
    (output,) = forward(imported, *inputs)
    assert output.shape == wanted.shape
    assert np.linalg.norm(output - wanted) <= 1e-5 * np.linalg.norm(wanted)
    return imported


def evaluated(onnx_model: Any, *inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the outputs that ONNX's own evaluator computes for a model."""
    run = reference.ReferenceEvaluator(onnx_model)
    return run.run(None, dict(zip([i.name for i in onnx_model.graph.input], inputs, strict=True)))
