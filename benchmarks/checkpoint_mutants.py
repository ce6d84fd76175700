"""Mutated checkpoints: a module loads exactly the files that are valid for its network.

A file is valid if the `safetensors` library reads it and its names, shapes, types and counters are those of the
network. After a load, the module must hold the arrays that the library reads. After a refusal, it must hold the arrays
that it held before.

Needs no GPU. `safetensors.deserialize` on the bytes of the file is the reference; the module opens the file by another
function of the library. A seed draws every kind of mutation equally often.
"""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from checkpoint_mutations import KINDS, NUMPY, mutant
from record import start
from safetensors import SafetensorError, deserialize
from sharded import Verdict, asked, campaign, tell

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.options import Options
from mbc.runtime.module import Module
from mbc.source import Source

NETWORK = """network probe(batch = 2) {
  input x[batch, 2, 3, 3] : float
  input t[batch] : class
  logits = x |> conv(2, 3, pad=1) |> bn |> relu |> flatten |> linear(3)
  output logits
  loss (logits, t) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }"""

LARGEST = {"step": 2**63 - 1, "seed": 2**63 - 1, "updates": 2**32 - 1, "skipped": 2**32 - 1, "since_growth": 2**32 - 1}


def expected(file: bytes, shapes_of: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file as the library reads them, or None if the network cannot load the file."""
    try:
        read = dict(deserialize(file))
    except SafetensorError:
        return None
    integers = {f"control.{name}" for name in LARGEST}
    wanted = {**shapes_of, **dict.fromkeys(integers, (1,)), "control.loss_scale": (1,)}
    if read.keys() != wanted.keys() or any(tuple(read[name]["shape"]) != wanted[name] for name in wanted):
        return None
    arrays: dict[str, np.ndarray] = {}
    for name, entry in read.items():
        dtype = entry["dtype"]
        if (dtype not in NUMPY and dtype != "BF16") or (dtype[0] in "IU") != (name in integers):
            return None
        data = np.frombuffer(entry["data"], NUMPY.get(dtype, "<u2"))
        if dtype == "BF16":
            data = (data.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = data.reshape(wanted[name])
    if any(not 0 <= int(arrays[f"control.{name}"][0]) <= most for name, most in LARGEST.items()):
        return None
    scale = arrays["control.loss_scale"][0]
    return arrays if np.isfinite(scale) and scale >= np.finfo(np.float32).tiny else None


def held(net: Module) -> dict[str, np.ndarray]:
    """Return all arrays from which a module would continue."""
    return {**{name: net.state(name) for name in net.states}, **{k: np.array(v) for k, v in net.control.items()}}


def verdict(net: Module, file: bytes, path: Path) -> tuple[bool, bool, str | None]:
    """Return whether `net` should load a file, whether it loads it, and the fault that was found, or None."""
    wanted = expected(file, net.states)
    path.write_bytes(file)
    before = held(net)
    try:
        net.load(path)
    except MbcError as error:
        same = all(np.array_equal(array, before[name], equal_nan=True) for name, array in held(net).items())
        if error.code not in ("MBC163", "MBC164"):
            return wanted is not None, False, f"refused with {error.code}"
        if not same:
            return wanted is not None, False, "refused, and yet changed the module"
        return wanted is not None, False, None if wanted is None else f"refused: {error.message}"
    except BaseException as error:
        return wanted is not None, False, f"{type(error).__name__}: {error}"
    if wanted is None:
        return False, True, "loaded, though it should not be"
    with np.errstate(over="ignore"):
        for name, array in held(net).items():
            right = wanted.get(name, wanted.get(f"control.{name}"))
            if right is None or not np.array_equal(
                array, right.astype(array.dtype).reshape(array.shape), equal_nan=True
            ):
                return True, True, f"'{name}' is not what the file holds"
    return True, True, None


def probe() -> Module:
    """Return a small fp16 module after two steps; its checkpoint has a loss scale."""
    options = Options(gpu="h200", settings=(("train.precision", "fp16"),))
    net = Module(compile_plan(Source("probe.mbc", NETWORK), options), device="cpu")
    generator = np.random.default_rng(0)
    for _ in range(2):
        net.step(generator.normal(size=(2, 2, 3, 3)).astype(np.float32), generator.integers(0, 3, 2), lr=0.1)
    return net


@cache
def whole() -> tuple[Module, bytes]:
    """Return the module and its checkpoint."""
    net = probe()
    with tempfile.TemporaryDirectory() as folder:
        net.save(Path(folder) / "whole", metadata={"note": "probe"})
        return net, (Path(folder) / "whole").read_bytes()


def judge(seed: int, number: int) -> Verdict:
    """Judge one mutant, of every kind in turn."""
    net, file = whole()
    kind = KINDS[number % len(KINDS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant"
        valid, loaded, wrong = verdict(net, mutant(file, kind, random.Random(f"{seed}/{number}")), path)
        if loaded:
            path.write_bytes(file)
            net.load(path)
    failure = f"{kind}: {wrong}" if wrong else ""
    return Verdict("loaded" if loaded else "refused", failure, {f"{kind} valid": valid, f"{kind} loaded": loaded})


def main() -> None:
    """Run the command line."""
    tell(campaign("checkpoint_mutants", judge, asked(__doc__, 5_000), chunk=500))


if __name__ == "__main__":
    start(main)
