"""The pages of the gallery: examples as `mbc report` and `mbc diff` show them.

python docs/gallery.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from mbc.cli import main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# What docs/gallery.md calls each page. Pages are not in the repository, so that only the site links them.
TITLES = {
    "resnet18_in_1.8_GB.html": "ResNet-18 in 1.8 GB",
    "resnet18_h200_t4.html": "ResNet-18 on an H200 and a T4",
    "alexnet_h200_and_t4.html": "AlexNet on an H200 and a T4 together",
}
# By the name of the page: the words that make it, without where it goes.
PAGES = {
    "resnet18_in_1.8_GB.html": (
        "report", "resnet.mbc", "--gpu", "h200", "--set", "batch=128", "--set", "train.precision=bf16",
        "--set", "memory.device=1.8GB",
    ),
    "resnet18_h200_t4.html": ("diff", "resnet.mbc", "--gpu", "h200", "--gpu", "t4", "--set", "batch=32"),
    "alexnet_h200_and_t4.html": ("report", "alexnet.mbc", "--gpus", "h200,t4"),
}  # fmt: skip


def linked(markdown: str) -> str:
    """Return docs/gallery.md with a link from the title of each page to the page."""
    for name, title in TITLES.items():
        markdown = markdown.replace(f"| {title} |", f"| [{title}](gallery/{name}) |")
    return markdown


def make(folder: Path) -> list[Path]:
    """Plan the examples and write their pages, which takes half a minute of a core."""
    folder.mkdir(parents=True, exist_ok=True)
    pages: list[Path] = []
    for name, (command, source, *options) in PAGES.items():
        pages.append(folder / name)
        if main((command, str(EXAMPLES / source), *options, "-o", str(pages[-1]))):
            raise SystemExit(f"the page {name} cannot be written")
    return pages


if __name__ == "__main__":
    make(Path(sys.argv[1]))
