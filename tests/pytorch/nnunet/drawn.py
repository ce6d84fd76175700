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
NAME = "Dataset001_Drawn"
CASES = 5


def architecture(axes: int, **changed: Any) -> dict[str, Any]:
    kwargs = {
        "n_stages": 4, "features_per_stage": [4, 8, 8, 8], "conv_op": f"torch.nn.modules.conv.Conv{axes}d",
        "kernel_sizes": [[3] * axes] * 4, "strides": [[1] * axes, *[[2] * axes] * 3], "n_conv_per_stage": [2] * 4,
        "n_conv_per_stage_decoder": [1] * 3, "conv_bias": True, "dropout_op": None, "dropout_op_kwargs": None,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{axes}d", "norm_op_kwargs": {"affine": True},
        "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
    }  # fmt: skip
    return {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": kwargs | changed,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def configuration(axes: int, patch: int, batch: int) -> dict[str, Any]:
    resampled = {
        entry: value
        for kind, is_seg, order in (("data", False, 3), ("seg", True, 1), ("probabilities", False, 1))
        for entry, value in (
            (f"resampling_fn_{kind}", "resample_data_or_seg_to_shape"),
            (
                f"resampling_fn_{kind}_kwargs",
                {"is_seg": is_seg, "order": order, "order_z": 0, "force_separate_z": None},
            ),
        )
    }
    return resampled | {
        "data_identifier": f"nnUNetPlans_{axes}d", "preprocessor_name": "DefaultPreprocessor", "batch_size": batch,
        "patch_size": [patch] * axes, "spacing": [1.0] * axes, "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False], "batch_dice": axes == 2, "architecture": architecture(axes),
    }  # fmt: skip


PLANS: dict[str, Any] = {
    "dataset_name": NAME, "plans_name": "nnUNetPlans", "image_reader_writer": "NibabelIO",
    "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2], "label_manager": "LabelManager",
    "foreground_intensity_properties_per_channel": {"0": {}},
    "configurations": {"3d_fullres": configuration(3, 16, 2), "2d": configuration(2, 16, 4)},
}  # fmt: skip
LABELS = {
    "classes": {"background": 0, "outer": 1, "inner": 2},
    "regions": {"background": 0, "whole": [1, 2], "core": 2},
}
LABELS["ignored"] = LABELS["classes"] | {"ignore": 3}
DATA: dict[str, Any] = {"channel_names": {"0": "drawn"}, "file_ending": ".nii.gz", "numTraining": CASES}


def described(kind: str) -> dict[str, Any]:
    order = {"regions_class_order": [1, 2]} if kind == "regions" else {}
    return DATA | order | {"labels": LABELS[kind]}


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
            chosen.preprocessor_class(verbose=False).run_case_save(*case, manager, chosen, described("ignored"))
    split = {"train": ["1", "2", "3", "4"], "val": ["0"]}
    files = {"nnUNetPlans": PLANS, "dataset": described("classes"), "dataset_fingerprint": {}, "splits_final": [split]}
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
    trainer = trainer_class(name)(plans, configuration, 0, described(labels), torch.device(device))
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
    kinds = {"classes": 3, "ignored": 4, "regions": 2}[labels]
    target = []
    for scales in trainer._get_deep_supervision_scales() or [[1] * len(patch)]:
        channels = 2 if labels == "regions" else 1
        size = (int(length * scale) for length, scale in zip(patch, scales, strict=True))
        shape = trainer.batch_size, channels, *size
        target.append(torch.randint(kinds, shape, generator=generator).to(torch.bool if channels == 2 else torch.int16))
    images = torch.randn((trainer.batch_size, 1, *patch), generator=generator)
    return {"data": images, "target": target if trainer.enable_deep_supervision else target[0]}
