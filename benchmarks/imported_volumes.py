"""Networks of volumes of MONAI, nnU-Net and torchvision, imported unchanged and compared with PyTorch in fp64.

Each network of `imported_volumes.toml` is exported in training mode and imported. Outputs in training and in evaluation
mode, the loss, all gradients and all running statistics are compared within 1e-9 relative (`exactness.py`). Then
`from_torch` compares a step with the model once more. Probabilities of dropout are set to 0, because mbc and PyTorch
draw different numbers. Needs torch, torchvision, monai and dynamic-network-architectures, but no GPU; s3d takes 5 GB of
memory.

    python benchmarks/imported_volumes.py [--only NAME]

Rows are written one by one; another call continues with those that are missing or failed.
"""

from __future__ import annotations

import argparse
import copy
import pydoc
import tomllib
import warnings
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from exactness import judge, stirred, tensors_of
from imported_gradients import drop_nothing
from record import attempt, results, show, start

import mbc


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on a network. An error of `from_torch` is raised."""
    settings = {k: pydoc.locate(v) if "torch.nn." in str(v) else v for k, v in row.get("settings", {}).items()}
    torch.manual_seed(0)
    constructor: Any = pydoc.locate(row["class"])
    model, x = stirred(constructor(**settings)), torch.randn(row["input"])
    drop_nothing(model)
    verdict = judge(model, [x], "mse")
    outputs = len(tensors_of(copy.deepcopy(model)(x)))
    mbc.from_torch(
        model.train(), x, loss="mse" if outputs == 1 else [("mse", 0.5**i) for i in range(outputs)],
        optimizer=torch.optim.SGD(model.parameters(), 0.1), precision="fp64", device="cpu", check=True, progress=False,
    )  # fmt: skip
    parameters = sum(p.numel() for p in model.parameters())
    return {"verdict": verdict.kind, "detail": verdict.detail, "parameters": parameters, "from_torch": "equal", **row}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of networks")
    parser.add_argument("--again", action="store_true", help="take none of the rows that are there")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    networks = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    kept = results("imported_volumes", again=arguments.again)
    for name, row in networks.items():
        if arguments.only in name and not kept.done(name):
            kept.put(attempt(lambda row=row: compared(row), name))
    kept.arrange([*networks])
    show([*kept.rows.values()], ("name", "verdict", "from_torch", "parameters"))


if __name__ == "__main__":
    start(main)
