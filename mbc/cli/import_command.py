"""The command `mbc import`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mbc.cli.terminal import notes
from mbc.errors import MbcError
from mbc.progress import busy

if TYPE_CHECKING:
    from mbc.interchange.importing import ImportedModel


def run(arguments: argparse.Namespace) -> int:
    """Read a model, write its source and weights, and print what was written."""
    source = Path(arguments.output)
    weights = source.with_suffix(".safetensors") if arguments.weights is None else Path(arguments.weights)
    for path in (source, weights):
        check_free(path, arguments.force)
    from mbc.interchange.importing import import_model
    from mbc.interchange.state_dict import write_weights
    from mbc.runtime.replace import replace_file

    with notes(), busy(f"importing {arguments.model}"):
        name = arguments.name or source.stem
        path = Path(arguments.model)
        model = import_model(path, name, arguments.loss, arguments.flat, arguments.batch)
        checked = _check(path, model, arguments.loss, arguments.batch, arguments.check)
    network = model.network
    write_weights(weights, network)
    try:
        replace_file(source, (model.source.encode(),))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MbcError("MBC306", f"cannot write '{source}': {reason}", "choose another place") from error
    lines = model.source.count("\n")
    parameters = sum(array.size for array in network.arrays.values())
    if arguments.json:
        figures = {
            "source": str(source), "lines": lines, "weights": str(weights), "operations": len(network.steps),
            "keys": len(network.keys), "states": len(network.arrays), "numbers": parameters,
            "frozen": list(network.frozen), "checked": checked,
        }  # fmt: skip
        print(json.dumps(figures, indent=2))
        return 0
    print(f"{source}: {_counted(len(network.steps), 'operation')} in {_counted(lines, 'line')}")
    held = f"{parameters:,} numbers in {_counted(len(network.arrays), 'state')}"
    print(f"{weights}: {held}, for {_counted(len(network.keys), 'key')} of the state_dict")
    if checked:
        print("checked: it computes what the model does")
    print(f"train it: mbc train {source} --data DATA --weights {weights}")
    return 0


def _check(path: Path, model: ImportedModel, loss: str, batch: int | None, check: bool) -> bool:
    """Compare a network with the model that it was imported from; return whether the comparison ran."""
    from mbc.interchange.importing import ONNX

    network = model.network
    if path.suffix == ONNX:
        from mbc.interchange.from_onnx.check_onnx import check_onnx

        return check_onnx(path, batch, network, model.source, check or None)
    if not check:
        return False  # torch would unpickle the file: only on request
    from mbc.interchange.check import cannot_check

    try:
        from mbc.pytorch.check_model import check_file
    except ImportError as error:
        raise cannot_check(f"PyTorch cannot be imported here ({error})", "install it: pip install torch") from error
    return check_file(path, network, model.source, loss)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_free(path: Path, force: bool) -> None:
    """Raise MBC305 if a file exists and --force was not given."""
    if path.exists() and not force:
        raise MbcError("MBC305", f"'{path}' exists already", "name another file, or pass --force to replace it")
