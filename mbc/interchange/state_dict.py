"""A `state_dict` of torch as a file that mbc trains from, and back.

The file is a checkpoint of the network's states, under the network's names, which are torch's wherever the language
can say them. What a network has no state for (`num_batches_tracked`, buffers that no layer reads) is kept beside them,
under `state_dict.KEY`, and the metadata list every key of the `state_dict`, aliases included, with where its numbers
are.
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
    """Write what the states of an imported network begin with, and all that `export_weights` needs. MBC162 where the
    file cannot be written."""
    states = ((name, np.asarray(array, np.float32)) for name, array in network.arrays.items())
    tensors = [*states, *((f"{KEPT}{key}", array) for key, array in network.kept.items())]
    keys = [[key.name, key.state, list(key.shape), key.dtype, key.kept, key.per_update] for key in network.keys]
    write_checkpoint(path, tensors, {METADATA: json.dumps(keys, separators=(",", ":")), "mbc.writer": network.writer})


def read_keys(path: Path) -> tuple[tuple[Key, ...], dict[str, Array]]:
    """The keys of the `state_dict` that an imported file lists, and the tensors that only it has. Raises MBC163 for a
    file that is no checkpoint, MBC308 for one that was not written by an import."""
    checkpoint = Checkpoint(path)
    try:
        rows = cast("list[Any]", json.loads(checkpoint.metadata[METADATA]))
        keys = tuple(
            Key(str(n), str(s), tuple(int(d) for d in shape), str(t), str(k), int(by)) for n, s, shape, t, k, by in rows
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise MbcError(
            "MBC308",
            f"'{path}' does not say which keys its state_dict had",
            "give the weights that mbc import wrote beside the source",
        ) from error
    return keys, checkpoint.read_all(name for name in checkpoint.tensors if name.startswith(KEPT))


def export_weights(trained: Path, imported: Path, output: Path) -> int:
    """Write the weights of `trained` as a `state_dict` with the keys that the file `imported` lists, in safetensors;
    returns how many keys it has.

    `num_batches_tracked` goes on from what it was, by the updates that the checkpoint counts and its layer's calls in
    each. Raises MBC163 and MBC308
    as `read_keys` does, MBC309 (all states that are missing or have another shape), MBC162.
    """
    keys, kept = read_keys(imported)
    checkpoint = Checkpoint(trained)
    names = [key.state for key in keys if key.state]
    arrays = checkpoint.read_all({n for n in (*names, _UPDATES) if n in checkpoint.tensors})
    updates = int(arrays[_UPDATES].reshape(-1)[0]) if _UPDATES in arrays else 0
    wrong: list[str] = []
    made: list[tuple[str, Array]] = []
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
            made.append((key.name, array.astype(dtype).reshape(key.shape)))
    if wrong:
        listed = "\n  ".join(wrong)
        raise MbcError(
            "MBC309",
            f"'{trained}' does not fit the state_dict of '{imported}' ({len(wrong)} keys):\n  {listed}",
            "give a checkpoint of the network that was imported with it",
        )
    write_checkpoint(output, made, {"format": "pt"})
    return len(made)
