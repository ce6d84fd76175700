"""Five networks of torchvision and timm as sources of mbc, which their exported programs are imported as.

The sources are written once, into `build/imported` (`MBC_IMPORTED` names another folder). Where they are there already,
neither torch nor torchvision nor timm is needed. Weights are drawn at random and not kept.

    python benchmarks/imported_sources.py
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from modules import Job
from record import ROOT, start

from mbc.source import Source

FOLDER = Path(os.environ.get("MBC_IMPORTED", ROOT / "build" / "imported"))
SIZE = 224  # pixels of a side
ROWS = 64  # of a mini-batch of networks that BATCHES lacks
# Rows of a mini-batch: a step takes 3 to 11 ms on an H200.
BATCHES = {
    "timm/convnext_atto": 128,
    "torchvision/efficientnet_b0": 64,
    "torchvision/swin_t": 64,
    "timm/deit_tiny_patch16_224": 64,
    "segmentation/deeplabv3_mobilenet_v3_large": 16,
}


def written(name: str) -> Path:
    """Return the file of a network's source, which is exported and imported if the file does not exist."""
    path = FOLDER / f"{name.partition('/')[2]}.mbc"
    if not path.exists():
        try:
            import torch  # pyright: ignore[reportMissingImports]
            from imported import built, exported

            model = built(name)
        except ImportError as error:
            raise SystemExit(
                f"{path} does not exist, and to write it needs torch, torchvision and timm: {error}"
            ) from None
        created = exported(model, name, torch.randn(BATCHES.get(name, ROWS), 3, SIZE, SIZE))
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(created.source, encoding="utf-8")
    return path


def imported_jobs() -> list[Job]:
    """Return the five networks with their mini-batches."""
    paths = [written(name) for name in BATCHES]
    return [Job(p.stem, Source(p.name, p.read_text(encoding="utf-8")), (), p.stem) for p in paths]


def main() -> None:
    """Write the sources that are missing."""
    warnings.filterwarnings("ignore")
    for name in BATCHES:
        print(written(name), flush=True)


if __name__ == "__main__":
    start(main)
