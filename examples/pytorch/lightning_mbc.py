"""The LightningModule of lightning_torch.py with mbc, which steps in manual optimization.

Lightning counts its global steps by calls of the optimizer's own `step`, which mbc replaces. So limit a training by
`max_epochs`, not by `max_steps`.
"""

from pathlib import Path
from typing import Any

import lightning  # pyright: ignore[reportMissingImports]
import torch
from digits_network import loaders, network
from torch import nn

import mbc


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network, self.criterion = network(), nn.CrossEntropyLoss(label_smoothing=0.1)
        self.automatic_optimization = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def on_train_start(self) -> None:
        self.mbc = mbc.from_torch(
            self.network, torch.zeros(64, 1, 8, 8),
            loss=self.criterion, optimizer=self.optimizers(use_pl_optimizer=False), memory="1GB",
        )  # fmt: skip

    def on_train_end(self) -> None:
        self.mbc.close()

    def training_step(self, batch: Any, number: int) -> None:
        images, labels = batch
        loss = self.mbc.step(images, labels)
        self.log("loss", loss.item(), on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, number: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean())


def main(epochs: int = 5, checkpoint: Path = Path("digits.ckpt")) -> None:
    lightning.seed_everything(0)
    loop = lightning.Trainer(max_epochs=epochs, accelerator="auto", devices=1, logger=False, enable_checkpointing=False)
    loop.fit(Digits(), *loaders())
    print({name: round(float(value), 4) for name, value in loop.callback_metrics.items()})
    loop.save_checkpoint(checkpoint)


if __name__ == "__main__":
    main()
