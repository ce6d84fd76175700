"""MONAI's SupervisedTrainer with DynUNet and SegResNet on drawn volumes; `--mbc` puts a plan behind the network.

python monai_loop.py [--mbc] [--size 32] [--steps 8]
"""

# MONAI is optional, and it offers its names by packages that do not list them.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import argparse
from collections.abc import Callable
from typing import Any

import torch
from monai.engines import IterationEvents, SupervisedTrainer
from monai.losses import DiceCELoss
from monai.networks.nets import DynUNet, SegResNet
from monai.utils import set_determinism

import mbc

CLASSES, BATCH = 2, 2


def dynunet() -> Any:
    return DynUNet(
        3, 1, CLASSES, kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2), filters=(8, 16, 32),
        norm_name=("instance", {"affine": True}),
    )  # fmt: skip


def segresnet() -> Any:
    return SegResNet(3, init_filters=8, in_channels=1, out_channels=CLASSES, blocks_down=(1, 2), blocks_up=(1,))


def batches(size: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """Draw volumes in which a cube is brighter than the noise around it; its voxels are class 1."""
    drawn: list[dict[str, torch.Tensor]] = []
    for _ in range(steps):
        image, label = torch.randn(BATCH, 1, size, size, size), torch.zeros(BATCH, 1, size, size, size)
        for row in range(BATCH):
            corner = torch.randint(0, size // 2, (3,)).tolist()
            label[row, 0][tuple(slice(start, start + size // 2) for start in corner)] = 1
        drawn.append({"image": image + 2 * label, "label": label})
    return drawn


def train(make: Callable[[], Any], planned: bool, size: int, steps: int) -> list[float]:
    """Return the loss of each step."""
    set_determinism(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = make().to(device)
    if planned:
        mbc.module(network, torch.zeros(BATCH, 1, size, size, size, device=device), memory="4GB")
    losses: list[float] = []
    trainer = SupervisedTrainer(
        device=device, max_epochs=1, train_data_loader=batches(size, steps), network=network,
        optimizer=torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, nesterov=True),
        loss_function=DiceCELoss(to_onehot_y=True, softmax=True), decollate=False,
    )  # fmt: skip
    trainer.add_event_handler(
        IterationEvents.MODEL_COMPLETED, lambda engine: losses.append(engine.state.output["loss"].item())
    )
    trainer.run()
    return losses


def main(planned: bool, size: int = 32, steps: int = 8) -> dict[str, list[float]]:
    """Train both networks, print their losses and return them."""
    losses = {make.__name__: train(make, planned, size, steps) for make in (dynunet, segresnet)}
    for name, numbers in losses.items():
        print(f"{name}: loss {numbers[0]:.4f} at first, {numbers[-1]:.4f} at last")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbc", action="store_true")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    main(arguments.mbc, arguments.size, arguments.steps)
