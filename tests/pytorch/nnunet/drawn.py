"""A drawn data set as nnU-Net preprocesses it, tiny plans, and trainers of both kinds."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.pytorch.nnunet import TRAINERS

torch: Any = pytest.importorskip("torch", reason="nnU-Net is trained in PyTorch, which is not installed")
pytest.importorskip("nnunetv2", reason="nnU-Net is not installed: make test NNUNET=1")
ROOT = Path(__file__).resolve().parents[3]
CASES = 5
FOLDER = Path(__file__).parent
PLANS: dict[str, Any] = json.loads((FOLDER / "nnunet_plans.json").read_text(encoding="utf-8"))
NAME: str = PLANS["dataset_name"]
DATASETS: dict[str, Any] = json.loads(
    (FOLDER / "nnunet_datasets.json").read_text(encoding="utf-8")
)  # by kind of labels


@contextmanager
def drawn_data(folder: Path) -> Generator[Path]:
    """Draw a data set, and set nnU-Net's variables for it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("raw", "preprocessed", "results"):
            patch.setenv(f"nnUNet_{name}", str(folder / name))
        patch.setenv("nnUNet_extTrainer", str(TRAINERS))
        patch.setenv("nnUNet_n_proc_DA", "0")  # augmentation in this process
        draw(folder)
        yield folder


def draw(folder: Path) -> None:
    """Write raw volumes of nested shapes, and let nnU-Net preprocess them for all configurations."""
    spec: Any = importlib.util.spec_from_file_location("prepare", ROOT / "examples/02_volumes/prepare.py")
    prepare: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    nibabel: Any = importlib.import_module("nibabel")
    handler: Any = importlib.import_module("nnunetv2.utilities.plans_handling.plans_handler")
    manager = handler.PlansManager(copy.deepcopy(PLANS))
    raw, base = folder / "raw" / NAME, folder / "preprocessed" / NAME
    for path in (raw, base / "gt_segmentations", base / "nnUNetPlans_3d", base / "nnUNetPlans_2d", folder / "results"):
        path.mkdir(parents=True)
    random = np.random.default_rng(0)
    configurations = [manager.get_configuration(name) for name in PLANS["configurations"]]
    for number in range(CASES):
        paths = [raw / f"{number}_0000.nii.gz", base / "gt_segmentations" / f"{number}.nii.gz"]
        for array, file in zip(prepare.draw(random), paths, strict=True):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), file)
        for chosen in configurations:
            case = (str(base / chosen.data_identifier / str(number)), [str(paths[0])], str(paths[1]))
            chosen.preprocessor_class(verbose=False).run_case_save(*case, manager, chosen, DATASETS["ignored"])
    split = {"train": ["1", "2", "3", "4"], "val": ["0"]}
    files = {"nnUNetPlans": PLANS, "dataset": DATASETS["classes"], "dataset_fingerprint": {}, "splits_final": [split]}
    for name, content in files.items():
        (base / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def trainer_class(name: str) -> Any:
    """Return a trainer as `nnUNetv2_train -tr NAME` looks for it."""
    return importlib.import_module("nnunetv2.utilities.find_objects").recursive_find_trainer_class_by_name(name)


def trainer_of(
    name: str, configuration: str = "3d_fullres", labels: str = "classes", device: str = "cpu", begin: bool = True
) -> Any:
    """Return a trainer that nnU-Net finds by its name, initialized if it may `begin`."""
    plans = copy.deepcopy(PLANS) | {"continue_training": False}
    trainer = trainer_class(name)(plans, configuration, 0, DATASETS[labels], torch.device(device))
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 2, 2, 1
    return initialize(trainer) if begin else trainer


def initialize(trainer: Any) -> Any:
    """Return a trainer with weights of a fixed seed."""
    torch.manual_seed(0)
    trainer.initialize()
    return trainer


def batch_of(trainer: Any, seed: int, labels: str = "classes") -> dict[str, Any]:
    """Return a drawn mini-batch with a target for each output."""
    generator = torch.Generator().manual_seed(seed)
    patch = trainer.configuration_manager.patch_size
    kinds, channels, dtype = {"regions": (2, 2, torch.bool)}.get(labels, (3 + (labels == "ignored"), 1, torch.int16))
    target = []
    for scales in trainer._get_deep_supervision_scales():
        shape = (trainer.batch_size, channels, *(int(n * scale) for n, scale in zip(patch, scales, strict=True)))
        target.append(torch.randint(kinds, shape, generator=generator).to(dtype))
    return {"data": torch.randn((trainer.batch_size, 1, *patch), generator=generator), "target": target}
