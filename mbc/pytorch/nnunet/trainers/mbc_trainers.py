"""nnU-Net's trainer and its benchmark, with steps of mbc."""

from __future__ import annotations

import importlib
from typing import Any

from mbc.pytorch.nnunet.planned_training import PlannedTraining

_TRAINERS = "nnunetv2.training.nnUNetTrainer"
_default: Any = importlib.import_module(f"{_TRAINERS}.nnUNetTrainer")
_benchmark: Any = importlib.import_module(
    f"{_TRAINERS}.variants.benchmarking.nnUNetTrainerBenchmark_5epochs_noDataLoading"
)


class nnUNetTrainerMbc(PlannedTraining, _default.nnUNetTrainer):
    """nnU-Net's default trainer, whose steps are programs of mbc."""


class nnUNetTrainerMbcBenchmark_5epochs_noDataLoading(
    PlannedTraining, _benchmark.nnUNetTrainerBenchmark_5epochs_noDataLoading
):
    """nnU-Net's benchmark of five epochs without data loading, whose steps are programs of mbc."""
