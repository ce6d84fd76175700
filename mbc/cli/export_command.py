"""The command `mbc export`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mbc.cli.import_command import check_free


def run(arguments: argparse.Namespace) -> int:
    """Write the state_dict or the ONNX model, and print its number of keys or nodes."""
    output = Path(arguments.output)
    check_free(output, arguments.force)
    if output.suffix == ".onnx":
        return _onnx(arguments, output)
    from mbc.interchange.state_dict import export_weights

    count = export_weights(Path(arguments.checkpoint), Path(arguments.like), output)
    if arguments.json:
        print(json.dumps({"state_dict": str(output), "keys": count}, indent=2))
        return 0
    print(f"{output}: a state_dict of {count} keys")
    return 0


def _onnx(arguments: argparse.Namespace, output: Path) -> int:
    from mbc.interchange.to_onnx.export import export_onnx

    count = export_onnx(Path(arguments.checkpoint), Path(arguments.like), output, tuple(arguments.settings))
    if arguments.json:
        print(json.dumps({"onnx": str(output), "nodes": count}, indent=2))
        return 0
    print(f"{output}: an ONNX model of {count} nodes, in evaluation mode")
    return 0
