"""The functions of examples/data yield the bytes that `augment` takes, repeat their epochs, and train a network."""

from __future__ import annotations

import importlib
import io
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.runtime.module import Module
from mbc.source import Source
from mbc.train.accuracy import inputs_of
from mbc.train.data import open_data
from mbc.train.job import Job
from mbc.train.loop import train
from mbc.train.schedule import Schedule

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow, which is not installed")
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "data"
MODULES = ("decoding", "image_folder", "torch_loader", "tar_shards", "dali_loader")
CLASSES, IMAGES, SIZE = 3, 8, 24
SOURCE = f"""network photos(batch = 6) {{
  input photo[batch, {SIZE}, {SIZE}, 3] : uint8
  input label[batch] : class
  x = photo |> augment(crop=16, flip=true, order=hwc, mean=(0.5,), std=(0.25,))
  logits = x |> conv(4, 3, stride=2) |> relu |> flatten |> linear({CLASSES})
  output logits
  loss (logits, label) |> softmax_cross_entropy
}}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder of pictures whose colour gives the class, of several sizes and formats.

    There are folders for classes, and two shards.
    """
    root = tmp_path_factory.mktemp("data")
    draws = np.random.default_rng(0)
    packed: list[dict[str, bytes]] = [{}, {}]
    for label in range(CLASSES):
        (root / "photos" / f"class{label}").mkdir(parents=True)
        for i in range(IMAGES):
            width, height = draws.integers(SIZE, 3 * SIZE, 2)
            pixels = draws.integers(0, 60, (height, width, 3), np.uint8)
            pixels[..., label] += 150
            suffix = ".png" if i % 2 else ".jpg"
            file = root / "photos" / f"class{label}" / f"{i}{suffix}"
            Image.fromarray(pixels).save(file)
            packed[i % 2] |= {f"{label}-{i}{suffix}": file.read_bytes(), f"{label}-{i}.cls": str(label).encode()}
    for i, contents in enumerate(packed):
        with tarfile.open(root / f"{i:04}.tar", "w") as shard:
            for name, content in contents.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        patch.syspath_prepend(FOLDER)
        patch.setenv("PYTHONPATH", str(FOLDER), prepend=":")  # of worker processes
        patch.setenv("PHOTOS", str(root / "photos"))
        patch.setenv("SHARDS", str(root))
        patch.setenv("PHOTO_SIZE", str(SIZE))
        patch.setenv("PHOTO_WORKERS", "2")
        yield root
    for name in MODULES:
        sys.modules.pop(name, None)


def read(
    function: Callable[..., Iterator[tuple[np.ndarray, np.ndarray]]], *arguments: int
) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*function(*arguments), strict=True)
    return np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize(
    ("module", "package"), [("image_folder", "PIL"), ("torch_loader", "torch"), ("tar_shards", "PIL"),
                            ("dali_loader", "nvidia.dali")],
)  # fmt: skip
def test_an_epoch_is_the_same_each_time_and_ranks_share_it(folder: Path, module: str, package: str) -> None:
    pytest.importorskip(package)
    batches = importlib.import_module(module).batches
    images, labels = read(batches, 0, 0, 1)
    assert images.shape == (CLASSES * IMAGES, SIZE, SIZE, 3) and images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [IMAGES] * CLASSES
    # Each picture came with its class.
    assert (images.mean((1, 2)).argmax(1) == labels).all()
    again = read(batches, 0, 0, 1)
    np.testing.assert_array_equal(again[0], images)
    np.testing.assert_array_equal(again[1], labels)
    assert not np.array_equal(read(batches, 1, 0, 1)[0], images), "another epoch has another order"
    parts = [read(batches, 0, rank, 2) for rank in range(2)]
    together = np.concatenate([part[0] for part in parts])
    assert sorted(map(bytes, together)) == sorted(map(bytes, images))

    plan = compile_plan(Source("photos.mbc", SOURCE), Options(gpu="h200"))
    data = open_data(f"{module}:batches", inputs_of(plan.graph))
    with Module(plan, seed=0, device="cpu") as net:
        history = train(net, Job(plan.graph, data, Schedule(0.05, 3)))
    assert [epoch.rows for epoch in history] == [24] * 3 and history[-1].loss < history[0].loss


def test_a_test_set_comes_in_order(folder: Path) -> None:
    images, labels = read(importlib.import_module("image_folder").in_order)
    assert len(images) == 24 and labels.tolist() == sorted(labels.tolist())
