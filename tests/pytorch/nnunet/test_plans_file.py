"""Plans files of nnU-Net 2.8.1's planners, their older form, and the networks that `network.mbc` builds of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.ir.graph import Network, Role
from mbc.pytorch.nnunet.network_settings import patches, settings_of, source
from mbc.pytorch.nnunet.plans_file import Configuration, Dataset, read_dataset, read_plans
from mbc.source import Source

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "cases" / "nnunet"
ORGANS = read_dataset(CASES / "dataset.json")
# Parameters of nnU-Net's own network objects, with the head of the lowest resolution, which `network.mbc` leaves out.
PARAMETERS = {
    ("nnUNetPlans", "2d"): 33492960, ("nnUNetPlans", "3d_lowres"): 31206864, ("nnUNetPlans", "3d_fullres"): 31206864,
    ("nnUNetPlans", "3d_cascade_fullres"): 31219824,
    ("nnUNetResEncUNetMPlans", "2d"): 105937952, ("nnUNetResEncUNetMPlans", "3d_lowres"): 102361040,
    ("nnUNetResEncUNetMPlans", "3d_fullres"): 102361040, ("nnUNetResEncUNetMPlans", "3d_cascade_fullres"): 102374000,
    ("nnUNetResEncUNetLPlans", "2d"): 105937952, ("nnUNetResEncUNetLPlans", "3d_fullres"): 102361040,
    ("nnUNetResEncUNetXLPlans", "2d"): 105937952, ("nnUNetResEncUNetXLPlans", "3d_fullres"): 141495776,
}  # fmt: skip


def _network(configuration: Configuration, dataset: Dataset = ORGANS) -> Network:
    return lower(parse(source()), settings_of(configuration, dataset), None).network


def _rewritten(folder: Path, document: object) -> Path:
    path = folder / "plans.json"
    path.write_text(json.dumps(document))
    return path


def _document() -> dict[str, Any]:
    return json.loads((CASES / "nnUNetPlans.json").read_text())


@pytest.mark.parametrize("plans", sorted({plans for plans, _ in PARAMETERS}))
def test_networks_have_the_parameters_of_those_that_nnunet_builds(plans: str):
    configurations = read_plans(CASES / f"{plans}.json")
    assert [(c.plans, c.name) for c in configurations] == [key for key in PARAMETERS if key[0] == plans]
    for c in configurations:
        values = _network(c).values.values()
        head = (c.features[-2] + 1) * ORGANS.classes
        parameters = sum(math.prod(v.type.shape) for v in values if v.role is Role.PARAMETER)
        assert parameters + head == PARAMETERS[plans, c.name], c.name


@pytest.mark.parametrize(("example", "blocks", "convs"), [("nnunet", 2, 2), ("nnunet_resenc", (1, 3, 4, 6, 6, 6), 1)])
def test_the_network_of_volumes_is_that_of_the_examples(example: str, blocks: Any, convs: int):
    def operations(network: Network) -> list[Any]:
        values = network.values
        return [(o.kind, o.attributes, [values[name].type for name in o.outputs]) for o in network.operations]

    text = (ROOT / "examples" / f"{example}.mbc").read_text().replace(", bias=true) @up", ") @up")
    theirs = lower(parse(Source("example.mbc", text)), (("patch", "(64, 64, 64)"),), None).network
    words = {
        "bias": "false", "patch": "(64, 64, 64)", "blocks": str(blocks if convs == 1 else (blocks,) * 6),
        "decoder_convs": str((convs,) * 5), "residual_encoder": str(convs == 1).lower(),
    }  # fmt: skip
    assert operations(lower(parse(source()), tuple(words.items()), None).network) == operations(theirs)


def test_the_older_form_gives_the_same_configurations(tmp_path):
    document = _document()
    for entries in document["configurations"].values():
        if "inherits_from" not in entries:
            network = entries.pop("architecture")["arch_kwargs"]
            entries |= {
                "UNet_class_name": "PlainConvUNet", "UNet_base_num_features": 32,
                "unet_max_num_features": network["features_per_stage"][-1],
                "n_conv_per_stage_encoder": network["n_conv_per_stage"],
                "n_conv_per_stage_decoder": network["n_conv_per_stage_decoder"],
                "pool_op_kernel_sizes": network["strides"], "conv_kernel_sizes": network["kernel_sizes"],
            }  # fmt: skip
    assert read_plans(_rewritten(tmp_path, document)) == read_plans(CASES / "nnUNetPlans.json")


def test_regions_and_ignored_labels_of_a_dataset(tmp_path):
    labels = {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}
    dataset = read_dataset(_rewritten(tmp_path, {"channel_names": {"0": "T1", "1": "T2"}, "labels": labels}))
    assert dataset == Dataset(2, 2, 2, True)
    network = _network(read_plans(CASES / "nnUNetPlans.json")[0], dataset)
    assert network.values["image"].type.shape[1] == network.values["target"].type.shape[1] == 2


@pytest.mark.parametrize(
    ("place", "value", "code", "message"),
    [
        (("configurations",), None, "MBC391", "no plans file of nnU-Net 2, but of nnU-Net 1: it has no 'configurat"),
        (("configurations", "2d", "patch_size"), [384], "MBC391", "'patch_size' of configuration '2d' of "),
        (("configurations", "2d", "patch_size"), [384, 100], "MBC391", "is not divisible by the strides, (64, 64)"),
        (("configurations", "2d", "batch_size"), "many", "MBC391", "is missing, or not what nnU-Net 2 writes"),
        (("configurations", "2d", "median_image_size_in_voxels"), [1e400, 1], "MBC391", "is missing, or not what"),
        (("configurations", "3d_fullres", "inherits_from"), "3d_cascade_fullres", "MBC391", "or inherits itself"),
        (("configurations", "2d", "architecture", "network_class_name"), "a.Swin", "MBC392", "has the network 'Swin'"),
        (("configurations", "2d", "architecture", "arch_kwargs", "norm_op"), "BatchNorm2d", "MBC392", "which mbc does"),
        (("configurations", "2d", "architecture", "arch_kwargs", "strides"), 1.5, "MBC391", "'strides' of configurat"),
    ],
)
def test_refusals(tmp_path, place, value, code, message):
    document = _document()
    entries = document | {"plans_per_stage": {}}
    at: Any = entries
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    with pytest.raises(MbcError) as caught:
        read_plans(_rewritten(tmp_path, entries))
    assert caught.value.code == code and message in caught.value.message


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": ' * 5000])
def test_files_that_are_no_json(tmp_path, text):
    path = tmp_path / "plans.json"
    path.write_text(text)
    with pytest.raises(MbcError, match="MBC390: cannot read"):
        read_plans(path)


def test_patches_keep_the_aspect_of_the_image():
    sizes = patches(read_plans(CASES / "nnUNetPlans.json")[2])
    assert sizes[:3] == ((128, 128, 128), (128, 160, 128), (128, 160, 160)) and sizes[-1] == (320, 384, 384)
