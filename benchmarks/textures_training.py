"""One training of `textures_task`, by mbc or by PyTorch, from equal weights and on equal mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from textures_task import DECAY, LEARNING_RATE, MEAN, STD, Arrays, Crops, Task, centre

from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.ir.averages import average_name
from mbc.ir.types import DType, Precision
from mbc.runtime.initial_states import initial
from mbc.runtime.module import Module


@dataclass(frozen=True)
class Trained:
    """Result of a training.

    Attributes:
        accuracy: Share of the test patches that the moving averages classify correctly.
        last_accuracy: Share that the weights of the last step classify correctly.
        loss: Mean of the losses of the last epoch's steps.
        states: Parameters, statistics and moving averages by mbc's names.
    """

    accuracy: float
    last_accuracy: float
    loss: float
    states: Mapping[str, NDArray[Any]]

    def figures(self) -> dict[str, float]:
        """Return the figures of the row."""
        return {"accuracy": self.accuracy, "last_accuracy": self.last_accuracy, "loss": self.loss}


def initial_states(lowered: Lowered, seed: int) -> Mapping[str, NDArray[Any]]:
    """Return the weights and statistics that mbc's module draws from `seed`."""
    network = lowered.network
    kept = DType.FP64 if lowered.precision is Precision.FP64 else DType.FP32
    types = {s.value: replace(network.values[s.value].type, dtype=kept) for s in network.states}
    return {s.value: initial(s.value, types[s.value], s.initializer, seed) for s in network.states}


def by_mbc(package: Any, task: Task, data: Arrays, seed: int, device: str) -> Trained:
    """Train the compiled task, and return the result. `package` is a plan on the CPU, a package's folder on a GPU."""
    crops, losses = Crops(seed), list[float]()
    with Module(package, seed=seed, device=device) as net:
        drawn = initial_states(lower(parse(task.source()), task.settings), seed)
        if any(not np.array_equal(net.state(name), value) for name, value in drawn.items()):
            raise RuntimeError("the module does not begin with the weights that PyTorch is given")
        for number, (rows, rate) in enumerate(task.steps(data, seed)):
            photos = data["photo"][rows]
            loss = net.step(crops(photos) if task.shared else photos, data["target"][rows], lr=rate)
            if number >= task.last_epoch(data):  # before, the GPU runs ahead, as if no loss were read
                losses.append(loss.item())

        def accuracy() -> float:
            photos = centre(data["test_photo"]) if task.shared else data["test_photo"]
            parts = range(0, len(photos), task.batch)
            logits = [np.asarray(net.forward(photos[first : first + task.batch])) for first in parts]
            return float((np.concatenate(logits).argmax(1) == data["test_target"]).mean())

        last_accuracy = accuracy()
        with net.averaged():
            averaged = accuracy()
        names = (*drawn, *map(average_name, drawn))
        states = {name: np.asarray(net.state(name), np.float64) for name in names}
        return Trained(averaged, last_accuracy, float(np.mean(losses)), states)


def by_torch(task: Task, data: Arrays, seed: int, device: str) -> Trained:
    """Train PyTorch's twin, and return the result. The host draws its crops and flips."""
    import torch  # pyright: ignore[reportMissingImports]

    from mbc.bench.torch_network import TorchNetwork

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = task.precision == "tf32"
    dtype = torch.float64 if task.precision == "fp64" else torch.float32
    autocast = torch.autocast(device, torch.bfloat16, enabled=task.precision == "bf16")
    lowered = lower(parse(task.source_of_floats()), task.settings)
    rule = lowered.optimizer
    model = TorchNetwork(lowered.network, initial_states(lowered, seed), dtype, device, True).train()
    optimizer = model.optimizer(rule, LEARNING_RATE)
    swa = torch.optim.swa_utils
    average: Any = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(DECAY), use_buffers=True)
    mean, std = (torch.tensor(values, dtype=dtype, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    crops, losses = Crops(seed), list[float]()

    def place(cropped: NDArray[Any], classes: NDArray[Any]) -> tuple[Any, Any]:
        photos = torch.tensor(cropped, device=device).to(dtype).permute(0, 3, 1, 2)
        return (photos / 255 - mean) / std, torch.tensor(classes).long().to(device)

    def accuracy(network: Any) -> float:
        right = 0
        with torch.no_grad(), autocast:
            for first in range(0, len(data["test_photo"]), task.batch):
                rows = slice(first, first + task.batch)
                photos, classes = place(centre(data["test_photo"][rows]), data["test_target"][rows])
                _, (logits, *_) = network.forward((photos, classes))
                right += int((logits.argmax(1) == classes).sum())
        return right / len(data["test_photo"])

    for number, (rows, rate) in enumerate(task.steps(data, seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        with autocast:
            loss, _ = model.forward(place(crops(data["photo"][rows]), data["target"][rows]))
        loss.backward()
        model.clip(rule)
        optimizer.step()
        average.update_parameters(model)
        if number >= task.last_epoch(data):
            losses.append(loss.item())
    averages = average.module.states()
    states = model.states() | {average_name(name): value for name, value in averages.items()}
    return Trained(accuracy(average.module.eval()), accuracy(model.eval()), float(np.mean(losses)), states)
