"""A `state_dict` of PyTorch as a file that mbc trains from, and back.

The file is a checkpoint of the network's states. Their names are PyTorch's wherever the language allows them. Tensors
without a state (`num_batches_tracked`, buffers that no layer reads) are stored beside the states under
`state_dict.KEY`. The metadata lists every key of the `state_dict`, aliases included, and the place of its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from mbc.errors import MbcError
from mbc.interchange.program import NUMPY, Array
from mbc.interchange.steps import Imported, Key
from mbc.runtime.checkpoint import Checkpoint, write_checkpoint
from mbc.runtime.weights import KEPT

METADATA = "mbc.state_dict"
_UPDATES = "control.updates"


def write_weights(path: Path, network: Imported) -> None:
    """Write the initial states of an imported network, and all data that `export_weights` needs.

    Raises:
        MbcError: MBC162 if the file cannot be written.
    """
    states = ((name, np.asarray(array, np.float32)) for name, array in network.arrays.items())
    tensors = [*states, *((f"{KEPT}{key}", array) for key, array in network.kept.items())]
    keys = [[key.name, key.state, list(key.shape), key.dtype, key.kept, key.per_update] for key in network.keys]
    write_checkpoint(path, tensors, {METADATA: json.dumps(keys, separators=(",", ":")), "mbc.writer": network.writer})


def read_keys(path: Path) -> tuple[tuple[Key, ...], dict[str, Array]]:
    """Return the keys of the `state_dict` that an imported file lists, and the tensors that have no state.

    Raises:
        MbcError: MBC163 if the file is no checkpoint; MBC308 if no import wrote it.
    """
    checkpoint = Checkpoint(path)
    try:
        rows = cast("list[Any]", json.loads(checkpoint.metadata[METADATA]))
        keys = tuple(
            Key(str(n), str(s), tuple(int(d) for d in shape), str(t), str(k), int(by)) for n, s, shape, t, k, by in rows
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise MbcError(
            "MBC308",
            f"'{path}' does not list the keys of its state_dict",
            "give the weights that mbc import wrote beside the source",
        ) from error
    return keys, checkpoint.read_all(name for name in checkpoint.tensors if name.startswith(KEPT))


def export_weights(trained: Path, imported: Path, output: Path) -> int:
    """Write the weights of a checkpoint as a `state_dict` in safetensors.

    `num_batches_tracked` continues from its old value, by the checkpoint's number of updates and the calls of the layer
    in each update.

    Args:
        trained: The checkpoint.
        imported: The file that lists the keys, which `write_weights` wrote.
        output: The file to write.

    Returns:
        The number of keys.

    Raises:
        MbcError: MBC163 and MBC308 as in `read_keys`; MBC309 with all states that are missing or have another shape;
            MBC162.
    """
    keys, kept = read_keys(imported)
    checkpoint = Checkpoint(trained)
    names = [key.state for key in keys if key.state]
    arrays = checkpoint.read_all({n for n in (*names, _UPDATES) if n in checkpoint.tensors})
    updates = int(arrays[_UPDATES].reshape(-1)[0]) if _UPDATES in arrays else 0
    wrong: list[str] = []
    tensors: list[tuple[str, Array]] = []
    for key in keys:
        source: Mapping[str, Array] = arrays if key.state else kept
        array = source.get(key.state or f"{KEPT}{key.kept}")
        if array is None:
            wrong.append(f"missing     {key.state or key.kept} (for '{key.name}')")
        elif array.size != int(np.prod(key.shape, dtype=np.int64)):
            wrong.append(
                f"mismatched  {key.state or key.kept} {list(array.shape)} (for '{key.name}' {list(key.shape)})"
            )
        else:
            if key.per_update:
                array = array + array.dtype.type(updates * key.per_update)
            dtype = np.dtype(np.float32) if key.dtype == "bfloat16" else NUMPY.get(key.dtype, array.dtype)
            tensors.append((key.name, array.astype(dtype).reshape(key.shape)))
    if wrong:
        listed = "\n  ".join(wrong)
        raise MbcError(
            "MBC309",
            f"'{trained}' does not fit the state_dict of '{imported}' ({len(wrong)} keys):\n  {listed}",
            "give a checkpoint of the network that was imported with it",
        )
    write_checkpoint(output, tensors, {"format": "pt"})
    return len(tensors)
