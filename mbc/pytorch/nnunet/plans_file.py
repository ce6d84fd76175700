"""Reads plans files of nnU-Net 2 (`nnUNetPlans.json`) and its `dataset.json`, without nnU-Net.

Plans files of nnU-Net 2.4 and newer have an `architecture`; older ones have `UNet_class_name` and `conv_kernel_sizes`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mbc.errors import MbcError
from mbc.files import read_text

T = TypeVar("T")
Sizes = tuple[int, ...]

MOST_BYTES = 64 << 20
LEAST_STAGES = 3  # of two, nnU-Net trains no head: the lowest one has no weight
BLOCKS = {"PlainConvUNet": "n_conv_per_stage", "ResidualEncoderUNet": "n_blocks_per_stage"}  # by class of the network
# Arguments of these classes that `network.mbc` has one form of, and their values without the names of modules.
_ONE_FORM: dict[str, tuple[Any, ...]] = {
    "norm_op": ("InstanceNorm2d", "InstanceNorm3d"), "norm_op_kwargs": ({"eps": 1e-5, "affine": True},),
    "nonlin": ("LeakyReLU",), "nonlin_kwargs": ({"inplace": True},), "nonlin_first": (False,), "dropout_op": (),
    "stem_channels": (), "bottleneck_channels": (), "block": ("BasicBlockD",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration of a plans file.

    Attributes:
        plans: Name of the plans.
        name: Name of the configuration, such as `3d_fullres`.
        batch: Number of patches of a mini-batch.
        patch: Extent of a patch along each axis.
        median: Median extent of the images along each axis.
        batch_dice: Whether a class has one Dice index for the mini-batch.
        residual: Whether the encoder has residual blocks.
        features: Channels of each stage.
        kernels: Size of the filters of each stage.
        strides: Stride into each stage.
        blocks: Convolutions or residual blocks of each stage of the encoder.
        decoder_convs: Convolutions of each stage of the decoder, the lowest resolution first.
        bias: Whether convolutions before a norm have a bias.
        cascaded: Whether the prediction of a configuration of lower resolution is an input.
    """

    plans: str
    name: str
    batch: int
    patch: Sizes
    median: Sizes
    batch_dice: bool
    residual: bool
    features: Sizes
    kernels: tuple[Sizes, ...]
    strides: tuple[Sizes, ...]
    blocks: Sizes
    decoder_convs: Sizes
    bias: bool
    cascaded: bool

    @property
    def divisors(self) -> Sizes:
        """The product of the strides along each axis, which divides the extents of every patch."""
        return tuple(math.prod(axis) for axis in zip(*self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Dataset:
    """Channels of the images of a dataset, heads of its networks, labels without background, and kind of labels."""

    channels: int
    classes: int
    foreground: int
    regions: bool = False


def read_plans(path: Path) -> tuple[Configuration, ...]:
    """Return the configurations of a plans file.

    Raises:
        MbcError: MBC390, the file cannot be read; MBC391, no plans file of nnU-Net 2; MBC392, another network.
    """
    document = _read_json(path)
    configurations: Any = document.get("configurations")
    if not _is_a(configurations, dict):
        older = ", but of nnU-Net 1" if "plans_per_stage" in document else ""
        raise _no_plans(f"'{path}' is no plans file of nnU-Net 2{older}: it has no 'configurations'")
    plans = str(document.get("plans_name", path.stem))
    return tuple(_configuration(path, plans, str(name), configurations) for name in configurations)


def dataset_of(plans: Path, named: Path | None, channels: int | None, classes: int | None) -> Dataset:
    """Return the data set of a plans file.

    Args:
        plans: The plans file.
        named: Its `dataset.json`; None for the one beside it.
        channels: Number of channels, in place of that of the file.
        classes: Number of classes or regions, in place of that of the file.

    Raises:
        MbcError: MBC390 or MBC394, the file cannot be read or is missing, and the numbers are not given.
    """
    if channels and classes:
        return Dataset(channels, classes, classes - 1)
    path = named or plans.with_name("dataset.json")
    if not named and not path.exists():
        raise MbcError(
            "MBC394", f"'{plans}' does not say how many channels and classes there are, and no dataset.json is there",
            "name the file with --dataset, or give --channels and --classes",
        )  # fmt: skip
    held = read_dataset(path)
    foreground = classes - 1 if classes else held.foreground
    return Dataset(channels or held.channels, classes or held.classes, foreground, held.regions)


def read_dataset(path: Path) -> Dataset:
    """Return what a `dataset.json` of nnU-Net says about images and labels.

    Raises:
        MbcError: MBC390, the file cannot be read; MBC394, it names no channels or no labels.
    """
    document = _read_json(path)
    channels: Any = document.get("channel_names", document.get("modality"))
    labels: Any = document.get("labels")
    if not (_is_a(channels, dict) and _is_a(labels, dict) and channels and "background" in labels):
        raise MbcError(
            "MBC394", f"'{path}' is no dataset.json of nnU-Net 2: 'channel_names' or the label 'background' is missing",
            "give the file of the data set with --dataset, or --channels and --classes instead",
        )  # fmt: skip
    values = [value for name, value in labels.items() if name != "ignore"]
    regions = any(_is_a(value, list) for value in values)
    return Dataset(len(channels), len(values) - regions, len(values) - 1, regions)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document: Any = json.loads(read_text(path, MOST_BYTES))
        if not _is_a(document, dict):
            raise ValueError("it holds no object of JSON")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MbcError("MBC390", f"cannot read '{path}': {reason}", "give a JSON file of nnU-Net") from None
    return document


def _no_plans(message: str) -> MbcError:
    return MbcError("MBC391", message, "plan the experiment with nnU-Net 2: nnUNetv2_plan_experiment -d DATASET")


def inherited(configurations: Any, name: str) -> dict[str, Any]:
    """Return the entries of a configuration, together with those that it inherits from other configurations.

    Raises:
        KeyError: The name of a configuration that is missing or inherits from itself.
    """
    entries: dict[str, Any] = {}
    visited: list[str] = []
    while name:
        here = configurations.get(name)
        if not _is_a(here, dict) or name in visited:
            raise KeyError(name)
        visited.append(name)
        entries = {**here, **entries}
        name = str(here.get("inherits_from", ""))
    return entries


def _configuration(path: Path, plans: str, name: str, configurations: Any) -> Configuration:
    try:
        entries = inherited(configurations, name)
    except KeyError as error:
        what = f"configuration {error} is missing or inherits itself"
        raise _no_plans(f"'{path}' is no plans file of nnU-Net 2: {what}") from None
    place = f"configuration '{name}' of '{path}'"

    def take(part: Any, key: str, convert: Callable[[Any], T]) -> T:
        try:
            return convert(part[key])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise _no_plans(f"'{key}' of {place} is missing, or not what nnU-Net 2 writes") from None

    axes = take(entries, "patch_size", lambda patch: _within(len(patch), 2, 3))
    network_class, network = take(entries, *_network_in(entries))
    if network_class not in BLOCKS:
        raise _other_network(f"{place} has the network '{network_class}'")
    for key, forms in _ONE_FORM.items():
        value = network.get(key)
        if value is not None and (value.rsplit(".", 1)[-1] if isinstance(value, str) else value) not in forms:
            raise _other_network(f"{place} has a network with '{key}' = {value}")
    stages = take(network, "n_stages", lambda count: _within(count, LEAST_STAGES, 64))

    def of_stages(value: Any) -> tuple[Sizes, ...]:
        return tuple(_sizes(item, axes) for item in (value if _is_a(value, list) else [value] * stages))

    configuration = Configuration(
        plans, name,
        take(entries, "batch_size", lambda batch: _sizes(batch, 1)[0]),
        take(entries, "patch_size", lambda patch: _sizes(patch, axes)),
        take(entries, "median_image_size_in_voxels", lambda median: _sizes([round(size) for size in median], axes)),
        bool(entries.get("batch_dice")), network_class == "ResidualEncoderUNet",
        take(network, "features_per_stage", lambda features: _sizes(features, stages)),
        take(network, "kernel_sizes", lambda kernels: _of_length(of_stages(kernels), stages)),
        take(network, "strides", lambda strides: _of_length(of_stages(strides), stages)),
        take(network, BLOCKS[network_class], lambda blocks: _sizes(blocks, stages)),
        take(network, "n_conv_per_stage_decoder", lambda convs: _sizes(convs, stages - 1)),
        bool(network.get("conv_bias")), entries.get("previous_stage") is not None,
    )  # fmt: skip
    if any(size % divisor for size, divisor in zip(configuration.patch, configuration.divisors, strict=True)):
        raise _no_plans(f"'patch_size' of {place} is not divisible by the strides, {configuration.divisors}")
    return configuration


def _other_network(message: str) -> MbcError:
    return MbcError(
        "MBC392", f"{message}, which mbc does not predict",
        f"choose plans of {' or '.join(BLOCKS)} as nnU-Net's planners write them",
    )  # fmt: skip


def _network_in(entries: dict[str, Any]) -> tuple[str, Callable[[Any], tuple[str, dict[str, Any]]]]:
    """Return the entry that names the network, and a function of its value: class and arguments."""
    if "architecture" in entries:
        return "architecture", lambda a: (a["network_class_name"].rsplit(".", 1)[-1], dict(a["arch_kwargs"]))

    def older(network_class: str) -> tuple[str, dict[str, Any]]:
        blocks: Any = entries["n_conv_per_stage_encoder"]
        least, most = int(entries["UNet_base_num_features"]), int(entries["unet_max_num_features"])
        return network_class, {
            "n_stages": len(blocks), "features_per_stage": [min(least << s, most) for s in range(len(blocks))],
            "kernel_sizes": entries["conv_kernel_sizes"], "strides": entries["pool_op_kernel_sizes"],
            BLOCKS.get(network_class, ""): blocks, "n_conv_per_stage_decoder": entries["n_conv_per_stage_decoder"],
            "conv_bias": True,
        }  # fmt: skip

    return "UNet_class_name", older


def _is_a(value: Any, kind: type) -> bool:
    """Return whether a value of JSON has a type, which pyright forgets: it knows nothing of the items."""
    return isinstance(value, kind)


def _within(number: int, least: int, most: int) -> int:
    if not least <= number <= most:
        raise ValueError
    return number


def _of_length(items: tuple[Sizes, ...], count: int) -> tuple[Sizes, ...]:
    return items[: _within(len(items), count, count)]


def _sizes(value: Any, count: int) -> Sizes:
    """Return whole numbers above 0; one number stands for `count` of them."""
    values = value if _is_a(value, list) else [value] * count
    return tuple(
        _within(int(number) if number % 1 == 0 else 0, 1, 1 << 40)
        for number in values[: _within(len(values), count, 1 << 10)]
    )
