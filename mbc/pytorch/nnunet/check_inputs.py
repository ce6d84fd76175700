"""Plans, checkpoints and data sets that cannot be trained; they are refused before training starts."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from mbc.errors import MbcError
from mbc.pytorch.nnunet.plans_file import inherited

torch: Any = importlib.import_module("torch")
_OF_PLANS = ("dataset_name", "plans_name", "configurations", "image_reader_writer", "transpose_forward")
_OF_CONFIGURATION = ("data_identifier", "batch_size", "patch_size", "batch_dice", "architecture")
_EARLIER = "UNet_class_name"  # describes the network in plans before nnU-Net 2.4
_OF_CHECKPOINT = ("network_weights", "optimizer_state", "init_args", "current_epoch", "logging", "_best_ema")


def check_plans(plans: Mapping[str, Any], configuration: str) -> None:
    """Raise MBC396 for plans that this version of nnU-Net does not read, or that lack the configuration.

    Raises:
        MbcError: MBC396.
    """
    if lacking := [key for key in _OF_PLANS if key not in plans]:
        of_first = " (the plans are those of nnU-Net 1)" if "plans_per_stage" in plans else ""
        _refuse_plans(f"they lack '{lacking[0]}'{of_first}")
    configurations: Mapping[str, Any] = plans["configurations"]
    try:
        entries = inherited(configurations, configuration)
    except KeyError as error:
        _refuse_plans(f"they have no configuration {error}, but {', '.join(configurations)}")
    required = (key for key in _OF_CONFIGURATION if key != "architecture" or _EARLIER not in entries)
    if lacking := [key for key in required if key not in entries]:
        _refuse_plans(f"the configuration '{configuration}' lacks '{lacking[0]}'")


def check_checkpoint(file: str, network: Any) -> None:
    """Raise MBC397 for a file that is no checkpoint of nnU-Net, or one of another network.

    Raises:
        MbcError: MBC397.
    """
    try:
        checkpoint = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0]
        _refuse_checkpoint(file, f"cannot be read: {reason}")
    entries: Mapping[str, Any] = cast("Mapping[str, Any]", checkpoint) if isinstance(checkpoint, Mapping) else {}
    if lacking := [key for key in _OF_CHECKPOINT if key not in entries]:
        _refuse_checkpoint(file, f"is no checkpoint of nnU-Net: it has no '{lacking[0]}'")
    weights: Mapping[str, Any] = entries["network_weights"]
    theirs = {key.removeprefix("module."): list(tensor.shape) for key, tensor in weights.items()}
    ours = {key: list(tensor.shape) for key, tensor in network.state_dict().items()}
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    if differing:
        key = differing[0]
        own, other = (str(shapes.get(key, "missing")) for shapes in (ours, theirs))
        more = f", and {len(differing) - 1} more tensors differ" if len(differing) > 1 else ""
        _refuse_checkpoint(file, f"is of another network: '{key}' is {other}, but the plans' is {own}{more}")


def check_labels(folder: Path, dataset_class: Any, label_manager: Any) -> None:
    """Raise MBC398 for a preprocessed data set without labels.

    Args:
        folder: The folder of a configuration's preprocessed cases.
        dataset_class: nnU-Net's class of data sets in this folder.
        label_manager: nnU-Net's labels of the data set.

    Raises:
        MbcError: MBC398.
    """
    if not (label_manager.foreground_regions if label_manager.has_regions else label_manager.foreground_labels):
        _refuse_data(folder, "its dataset.json has no label besides the background")
    cases: list[str] = sorted(dataset_class.get_identifiers(str(folder)))
    names = {path.name for path in folder.iterdir()}
    forms = ("{}_seg.b2nd", "{}_seg.npy", "{}.npz")
    if unlabelled := [case for case in cases if not any(form.format(case) in names for form in forms)]:
        more = f" and {len(unlabelled) - 1} more cases" if len(unlabelled) > 1 else ""
        _refuse_data(folder, f"'{unlabelled[0]}'{more} has no segmentation")
    if not any(_has_labels(folder / f"{case}.pkl") for case in cases):
        _refuse_data(folder, f"none of its {len(cases)} cases has a labelled voxel")


def _has_labels(properties: Path) -> bool:
    with properties.open("rb") as file:
        places: Mapping[Any, Any] = pickle.load(file).get("class_locations", {})
    return any(len(listed) for listed in places.values())


def _refuse_plans(reason: str) -> NoReturn:
    remedy = (
        "plan the data set with this version: nnUNetv2_plan_and_preprocess -d ID, and name one of its configurations"
    )
    raise MbcError("MBC396", f"nnU-Net's plans do not fit: {reason}", remedy)


def _refuse_checkpoint(file: str, reason: str) -> NoReturn:
    remedy = "continue with the plans that it was trained with, or begin a new training without --c"
    raise MbcError("MBC397", f"the checkpoint '{file}' {reason}", remedy)


def _refuse_data(folder: Path, reason: str) -> NoReturn:
    remedy = "put the segmentations into labelsTr, and preprocess again: nnUNetv2_plan_and_preprocess -d ID --clean"
    raise MbcError("MBC398", f"the data set in '{folder}' cannot be trained: {reason}", remedy)
