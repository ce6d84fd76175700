"""ResNet-18 on patches of pictures, the whole recipe, by mbc and by PyTorch, over several seeds.

Twelve pictures that scikit-image comes with are the classes; patches for training and for testing come from regions of
them that do not overlap. The recipe: bytes, random crops and flips, label smoothing, SGD with Nesterov momentum, no
weight decay of norms and biases, gradients clipped to a norm, moving averages, which are evaluated, a cosine schedule.
Both see the same rows in the same order, and draw crops and flips by themselves.

    python benchmarks/textures.py --prepare FOLDER_OF_PICTURES     # skimage/data of an installed scikit-image; Pillow
    python benchmarks/textures.py [--seeds 5] [--epochs 12] [--precision bf16] [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from feeding import FLOATS
from record import ROOT, attempt, need_gpu, results, show, start

from mbc.codegen.build import write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.compiler import compile_plan
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.initial import initial
from mbc.runtime.module import Module
from mbc.source import Source

DATA = ROOT / "build" / "textures.npz"
PICTURES = (
    "astronaut.png", "brick.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png",
    "hubble_deep_field.jpg", "ihc.png", "moon.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip
PATCH, CROP, BATCH = 56, 48, 64
TRAIN, TEST = 160, 60  # patches of a class
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEARNING_RATE, SMOOTHING, DECAY = 0.05, 0.1, 0.98
RECIPE = f"""train {{
  optimizer = sgd(momentum=0.9, nesterov=true, weight_decay=5e-4)
  no_decay = norm_and_bias  clip_norm = 2.0  ema = {DECAY}
}}"""
COLUMNS = ("name", "seeds", "mean", "spread", "each", "torch_mean", "torch_spread", "torch_each", "passed")


def prepare(folder: Path) -> None:
    """Patches of the left two thirds of each picture to train on, of the right quarter to test on."""
    from PIL import Image

    draws = np.random.default_rng(0)
    arrays: dict[str, list[np.ndarray]] = {"photo": [], "test_photo": []}
    for name in PICTURES:
        picture = np.asarray(Image.open(folder / name).convert("RGB"))
        width = picture.shape[1]
        for part, (left, right), count in (
            ("photo", (0, 2 * width // 3), TRAIN),
            ("test_photo", (3 * width // 4, width), TEST),
        ):
            for _ in range(count):
                y = draws.integers(0, picture.shape[0] - PATCH + 1)
                x = draws.integers(left, max(left + 1, right - PATCH + 1))
                arrays[part].append(picture[y : y + PATCH, x : x + PATCH])
    DATA.parent.mkdir(parents=True, exist_ok=True)
    classes = np.arange(len(PICTURES), dtype=np.int32)
    np.savez_compressed(
        DATA,
        photo=np.stack(arrays["photo"]), target=np.repeat(classes, TRAIN),
        test_photo=np.stack(arrays["test_photo"]), test_target=np.repeat(classes, TEST),
    )  # fmt: skip


def source(of_bytes: bool) -> Source:
    """The example with the recipe; with floats, what PyTorch's twin runs."""
    text = (ROOT / "examples" / "resnet.mbc").read_text(encoding="utf-8")
    text = text[: text.index("train {")] + RECIPE
    text = text.replace("|> softmax_cross_entropy", f"|> softmax_cross_entropy(smoothing={SMOOTHING})")
    if of_bytes:
        augmented = f"photo |> augment(crop=size, flip=true, order=hwc, mean={MEAN}, std={STD})"
        text = text.replace(FLOATS, f"input photo[batch, {PATCH}, {PATCH}, 3] : uint8")
        text = text.replace("x = image |> conv", f"image = {augmented}\n  x = image |> conv")
    return Source("textures.mbc", text)


def settings(precision: str) -> tuple[tuple[str, str], ...]:
    return (
        ("batch", str(BATCH)), ("classes", str(len(PICTURES))), ("size", str(CROP)), ("train.precision", precision),
    )  # fmt: skip


def orders(rows: int, epochs: int, seed: int) -> Iterator[tuple[np.ndarray, float]]:
    """Rows of each mini-batch and its learning rate."""
    draws = np.random.default_rng(seed)
    steps = rows // BATCH
    for epoch in range(epochs):
        order = draws.permutation(rows)
        for i in range(steps):
            done = (epoch * steps + i) / (epochs * steps)
            yield order[i * BATCH : (i + 1) * BATCH], LEARNING_RATE * (1 + np.cos(np.pi * done)) / 2


def by_mbc(package: Any, data: Any, seed: int, epochs: int, device: str) -> float:
    with Module(package, seed=seed, device=device) as net:
        for rows, rate in orders(len(data["photo"]), epochs, seed):
            net.step(data["photo"][rows], data["target"][rows], lr=rate)
        right = 0
        with net.averaged():
            for first in range(0, len(data["test_photo"]), BATCH):
                logits = np.asarray(net.forward(data["test_photo"][first : first + BATCH]))
                right += int((logits.argmax(1) == data["test_target"][first : first + BATCH]).sum())
        return right / len(data["test_photo"])


def by_torch(plan: Plan, data: Any, seed: int, epochs: int, device: str, precision: str) -> float:
    """Its initial weights are drawn as mbc draws them."""
    import torch  # pyright: ignore[reportMissingImports]

    from mbc.bench.torch_network import TorchNetwork

    lowered = lower(parse(source(False)), settings(precision))
    network, rule = lowered.network, lowered.optimizer
    states = {s.value: initial(s.value, network.values[s.value].type, s.initializer, seed) for s in network.states}
    model = TorchNetwork(network, states, torch.float32, device, True).train()
    optimizer = model.optimizer(rule, LEARNING_RATE)
    swa = torch.optim.swa_utils
    average: Any = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(DECAY), use_buffers=True)
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    draws = np.random.default_rng(seed + 1000)
    autocast = torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")

    def normal(bytes_: np.ndarray) -> Any:
        return (torch.tensor(bytes_, device=device).permute(0, 3, 1, 2) / 255 - mean) / std

    def augmented(photos: np.ndarray) -> Any:
        cropped = np.empty((len(photos), CROP, CROP, 3), np.uint8)
        for i, (y, x) in enumerate(draws.integers(0, PATCH - CROP + 1, (len(photos), 2))):
            patch = photos[i, y : y + CROP, x : x + CROP]
            cropped[i] = patch[:, ::-1] if draws.random() < 0.5 else patch
        return normal(cropped)

    for rows, rate in orders(len(data["photo"]), epochs, seed):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        with autocast:
            loss, _ = model.forward(
                (augmented(data["photo"][rows]), torch.tensor(data["target"][rows]).long().to(device))
            )
        loss.backward()
        model.clip(rule)
        optimizer.step()
        average.update_parameters(model)
    evaluated, edge, right = average.module.eval(), (PATCH - CROP) // 2, 0
    with torch.no_grad(), autocast:
        for first in range(0, len(data["test_photo"]), BATCH):
            photos = data["test_photo"][first : first + BATCH, edge : edge + CROP, edge : edge + CROP]
            labels = torch.tensor(data["test_target"][first : first + BATCH]).long().to(device)
            _, (logits, *_) = evaluated.forward((normal(photos), labels))
            right += int((logits.argmax(1) == labels).sum())
    return right / len(data["test_photo"])


def judged(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Within PyTorch's spread: the distance of the means against the larger standard deviation over seeds."""
    spread, torch_spread = (statistics.stdev(found) if len(found) > 1 else 0.0 for found in (ours, theirs))
    mean, torch_mean = statistics.mean(ours), statistics.mean(theirs)
    return {
        "seeds": len(ours), "mean": mean, "spread": spread, "each": ours, "torch_mean": torch_mean,
        "torch_spread": torch_spread, "torch_each": theirs, "passed": mean >= torch_mean - max(spread, torch_spread),
    }  # fmt: skip


def row_of(arguments: argparse.Namespace, data: Any) -> dict[str, Any]:
    precision, device = arguments.precision, arguments.device
    gpu = "auto" if device == "cuda" else "h200"
    plan = compile_plan(source(True), Options(gpu=gpu, settings=settings(precision)))
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        package: Any = plan
        if device == "cuda":
            write_package((plan,), Path(folder) / "net", find_toolchain())
            package = Path(folder) / "net"
        for seed in range(arguments.seeds):
            began = time.perf_counter()
            ours.append(by_mbc(package, data, seed, arguments.epochs, device))
            between = time.perf_counter()
            theirs.append(by_torch(plan, data, seed, arguments.epochs, device, precision))
            seconds = f"{between - began:.1f} s and {time.perf_counter() - between:.1f} s"
            print(f"seed {seed}: mbc {ours[-1]:.4f}, torch {theirs[-1]:.4f} ({seconds})", flush=True)
    return judged(ours, theirs) | {"epochs": arguments.epochs, "device": device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the patches, and nothing else")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare)
        return
    if arguments.device == "cuda":
        need_gpu("--device cpu, which takes hours")
    if not DATA.exists():
        raise SystemExit(f"there is no {DATA.relative_to(ROOT)}: --prepare first")
    with np.load(DATA) as archive:
        data = dict(archive)
    held = results("textures")
    held.put(attempt(lambda: row_of(arguments, data), f"resnet18 {arguments.precision}"))
    show(list(held.rows.values()), COLUMNS)


if __name__ == "__main__":
    start(main)
