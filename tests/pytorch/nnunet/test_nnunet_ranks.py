"""Two processes of nnU-Net under PyTorch's DDP compute with mbc what they compute without it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.pytorch.nnunet import drawn

torch: Any = drawn.torch
TRAINERS = ("nnUNetTrainer", "nnUNetTrainerMbc")


def train(rank: int, folder: Path, device: str) -> None:
    """Train by both trainers as one of two ranks, and save losses and weights."""
    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    if device == "cpu":  # nnU-Net's own ranks are on GPUs
        module: Any = importlib.import_module("nnunetv2.training.nnUNetTrainer.nnUNetTrainer")
        distributed = module.DDP
        module.DDP = lambda network, device_ids: distributed(network)
    else:
        torch.cuda.set_device(rank)
    for name in TRAINERS:
        trainer = drawn.trainer_of(name, "2d", device=device, begin=False)
        if device == "cpu":
            trainer.device, trainer.grad_scaler = torch.device("cpu"), None
        drawn.initialize(trainer)
        trainer.on_train_start()
        trainer.on_train_epoch_start()
        batches = [drawn.batch_of(trainer, 10 * rank + seed) for seed in range(3)]
        losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
        assert trainer.batch_size == 2 and getattr(trainer, "planned", None) is None
        torch.save((losses, trainer.network.module.state_dict()), folder / f"{name}.{rank}.pt")
    torch.distributed.destroy_process_group()


def both(folder: Path, device: str, tolerance: float) -> None:
    torch.multiprocessing.spawn(train, (folder, device), nprocs=2)
    theirs, ours = ([torch.load(folder / f"{name}.{rank}.pt") for rank in range(2)] for name in TRAINERS)
    for (losses, weights), (wanted, expected) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(wanted, rel=tolerance)
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=10 * tolerance, atol=tolerance, msg=key)
    for key, tensor in ours[0][1].items():
        assert torch.equal(tensor.cpu(), ours[1][1][key].cpu()), key


def test_two_ranks_train_as_without_mbc(tmp_path: Path) -> None:
    with drawn.drawn_data(tmp_path):
        both(tmp_path, "cpu", 1e-5)
