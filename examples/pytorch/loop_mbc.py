"""The training loop of loop_torch.py with mbc, which adds two lines: the import and the call of `mbc.module`."""

from pathlib import Path

import torch
from digits_network import accuracy, loaders, network
from torch import nn

import mbc


def main(epochs: int = 5, checkpoint: Path = Path("digits.pt")) -> None:
    torch.manual_seed(0)
    model, (train, test) = network(), loaders()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
    mbc.module(model, next(iter(test))[0], memory="1GB")
    for epoch in range(epochs):
        total = 0.0
        for images, labels in train:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(train):.4f}, accuracy {accuracy(model, test):.3f}")
    torch.save(model.state_dict(), checkpoint)


if __name__ == "__main__":
    main()
