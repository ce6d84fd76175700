"""Hand-made archives in the form of torch.export.save: a convolution, with an error that a test chooses."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def tensor(shape: tuple[int, ...], dtype: int = 7, trained: bool = False) -> dict[str, Any]:
    strides = [int(np.prod(shape[n + 1 :])) for n in range(len(shape))]
    return {
        "dtype": dtype, "sizes": [{"as_int": n} for n in shape], "requires_grad": trained,
        "device": {"type": "cpu", "index": None}, "strides": [{"as_int": n} for n in strides],
        "storage_offset": {"as_int": 0}, "layout": 7,
    }  # fmt: skip


def graph() -> dict[str, Any]:
    """Return the graph of a convolution to five channels of an image [2, 3, 4, 4]."""
    nodes = [
        {
            "target": "torch.ops.aten.conv2d.default",
            "inputs": [
                {"name": "input", "arg": {"as_tensor": {"name": "x"}}, "kind": 1},
                {"name": "weight", "arg": {"as_tensor": {"name": "p_weight"}}, "kind": 1},
            ],
            "outputs": [{"as_tensor": {"name": "conv2d"}}],
            "metadata": {"nn_module_stack": "L__self__,,a.Net;L__self__stem,stem,torch.nn.Conv2d", "stack_trace": ""},
        }
    ]
    inputs = [
        {"parameter": {"arg": {"name": "p_weight"}, "parameter_name": "stem.weight"}},
        {"user_input": {"arg": {"as_tensor": {"name": "x"}}}},
    ]
    outputs = [{"user_output": {"arg": {"as_tensor": {"name": "conv2d"}}}}]
    shapes = {"p_weight": tensor((5, 3, 1, 1), trained=True), "x": tensor((2, 3, 4, 4)), "conv2d": tensor((2, 5, 4, 4))}
    return {
        "graph_module": {
            "graph": {"nodes": nodes, "tensor_values": shapes},
            "signature": {"input_specs": inputs, "output_specs": outputs},
        },
        "schema_version": {"major": 8, "minor": 20},
        "torch_version": "2.13.0",
    }


def weights() -> dict[str, Any]:
    meta = tensor((5, 3, 1, 1), trained=True)
    return {"config": {"stem.weight": {"path_name": "weight_0", "use_pickle": False, "tensor_meta": meta}}}


def write(path: Path, document: Any = None, config: Any = None, files: Mapping[str, bytes] | None = None) -> Path:
    """Write an archive of a graph, weights and their bytes; `files` replaces or adds entries."""
    entries = {
        "net/models/model.json": json.dumps(graph() if document is None else document).encode(),
        "net/data/weights/model_weights_config.json": json.dumps(weights() if config is None else config).encode(),
        "net/data/weights/weight_0": np.arange(15, dtype="<f4").tobytes(),
        **(files or {}),
    }
    file = path / "net.pt2"
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file
