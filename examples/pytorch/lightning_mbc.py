"""The LightningModule of lightning_torch.py with mbc, whose only difference is `on_train_start`."""

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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def on_train_start(self) -> None:
        mbc.module(self.network, torch.zeros(64, 1, 8, 8, device=self.device), memory="1GB")

    def training_step(self, batch: Any, number: int) -> Any:
        images, labels = batch
        loss = self.criterion(self.network(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

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
