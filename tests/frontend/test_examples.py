"""Every example is the network that its name says: parameter counts of papers, torchvision and timm."""

from __future__ import annotations

import pytest

from mbc.ir.graph import Role
from mbc.passes.check_graph import verify_network
from tests.frontend.reading import ROOT, lower_file, parameter_count

EXAMPLES = ROOT / "examples"
COUNTS = [
    ("alexnet.mbc", (), 61_100_840),
    ("alexnet_caffe.mbc", (), 60_965_224),
    ("vgg16.mbc", (), 138_357_544),
    ("resnet.mbc", (), 11_689_512),
    ("resnet.mbc", ("depth=34",), 21_797_672),
    ("resnet.mbc", ("depth=50",), 25_557_032),
    ("resnet.mbc", ("depth=101",), 44_549_160),
    ("resnet.mbc", ("depth=152",), 60_192_808),
    ("googlenet.mbc", (), 13_004_888),
    ("googlenet.mbc", ("aux=false",), 6_624_904),
    ("inception_v4.mbc", (), 42_679_816),
    ("densenet121.mbc", (), 7_978_856),
    ("mobilenet_v2.mbc", (), 3_504_872),
    ("unet.mbc", (), 31_037_698),
    # nnU-Net's own networks without the biases before norms and the head of the lowest stage, which have no effect.
    ("nnunet.mbc", (), 31_196_399 - 3_840 - 963),
    ("nnunet_resenc.mbc", (), 102_350_575 - 13_056 - 963),
    ("01_digits/net.mbc", (), 37_282),
    ("resnet_deep.mbc", (), 25_557_032),  # 3, 4, 6, 3: another place of the stride, the same parameters as ResNet-50
]
SMALL = {
    "alexnet.mbc": ("batch=2", "size=63", "width=4", "classes=7"),
    "alexnet_caffe.mbc": ("batch=2", "size=67", "width=6", "classes=7"),
    "vgg16.mbc": ("batch=2", "size=32", "width=2", "classes=7"),
    "resnet.mbc": ("batch=2", "size=32", "width=4", "classes=7", "depth=50"),
    "resnet_deep.mbc": ("batch=2", "size=35", "width=4", "classes=7"),
    "googlenet.mbc": ("batch=2", "size=80", "classes=7"),
    "inception_v4.mbc": ("batch=2", "size=75", "classes=7", "blocks=(1, 1, 1)"),
    "densenet121.mbc": ("batch=2", "size=32", "growth=2", "counts=(2, 2)", "classes=7"),
    "mobilenet_v2.mbc": ("batch=2", "size=32", "width=0.1", "classes=7"),
    "unet.mbc": ("batch=2", "size=16", "width=2", "depth=2", "classes=3"),
    "01_digits/net.mbc": ("batch=2", "width=3"),
    "nnunet.mbc": ("batch=2", "patch=(8, 8, 8)", "features=(2, 3, 4)", "strides=((1, 1, 1), (1, 2, 2), (2, 2, 2))"),
    "nnunet_resenc.mbc": ("batch=2", "patch=(8, 8, 8)", "features=(2, 3, 4)", "blocks=(1, 2, 1)"),
}


@pytest.mark.parametrize(("name", "settings", "count"), COUNTS, ids=[f"{n}{s}" for n, s, _ in COUNTS])
def test_parameter_count(name: str, settings: tuple[str, ...], count: int):
    network = lower_file(EXAMPLES / name, *settings).network
    verify_network(network)
    assert parameter_count(network) == count


@pytest.mark.parametrize(("n3", "millions", "convolutions"), [(596, 706, 1921), (788, 921, 2497)])
def test_deep_resnet(n3: int, millions: int, convolutions: int):
    network = lower_file(EXAMPLES / "resnet_deep.mbc", "n1=6", "n2=32", f"n3={n3}", "n4=6", "batch=1").network
    verify_network(network)
    assert round(parameter_count(network) / 1e6) == millions
    # The depth counts convolutions outside of projections, and the linear layer.
    main = [op for op in network.operations if op.kind == "convolution" and not op.name.endswith(".down")]
    assert len(main) == convolutions


@pytest.mark.parametrize("name", sorted(SMALL))
def test_sizes_are_parameters(name: str):
    network = lower_file(EXAMPLES / name, *SMALL[name]).network
    verify_network(network)
    assert network.batch == 2
    assert max(v.type.elements for v in network.values.values() if v.role is not Role.PARAMETER) < 500_000


def test_every_example_is_tested_and_short():
    sources = {p.relative_to(EXAMPLES).as_posix() for p in EXAMPLES.rglob("*.mbc")}
    assert sources == {name for name, _, _ in COUNTS} == set(SMALL)
    for name in sources:
        lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 45
        assert max(map(len, lines)) <= 120


def test_paths_of_resnet():
    network = lower_file(EXAMPLES / "resnet.mbc").network
    states = [s.value for s in network.states]
    assert states[:5] == ["stem.weight", "bn0.weight", "bn0.bias", "bn0.running_mean", "bn0.running_var"]
    assert "stage.0.unit.0.basic0.conv1.weight" in states
    assert "stage.1.unit.0.basic0.down.weight" in states
    assert "stage.0.unit.0.basic0.down.weight" not in states
    assert states[-2:] == ["head.weight", "head.bias"]
