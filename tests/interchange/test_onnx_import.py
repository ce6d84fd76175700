"""ONNX models as sources: every rule, patterns that exporters spell out, and how the sources read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.interchange.importing import ImportedModel, import_model
from tests.interchange import test_attention as attention
from tests.interchange.models import Model, Of, Tensor, forward, lowered, nn, torch
from tests.interchange.onnx_files import compared, evaluated, exported, helper, model, node, written

F = torch.nn.functional
# Most models here have convolutions with a bias and no batch norm.
pytestmark = pytest.mark.filterwarnings("ignore:.*folded:RuntimeWarning")
IMAGE = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Unit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class Inside(nn.Module):
    """A model that applies other operations around a layer."""

    def __init__(self, layer: Model, function: Callable[[Tensor, Model], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.layer)


def _channels_last(x: Tensor, layer: Model) -> Tensor:
    return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _of_layer(layer: Model) -> Model:
    return Of(layer, layer=layer)


MODELS = {
    "activations": Of(lambda x: F.relu6(F.leaky_relu(F.elu(F.hardsigmoid(F.softplus(torch.tanh(x)))), 0.2))),
    "silu": Of(lambda x: F.silu(x) + F.hardswish(x) + F.mish(x)),
    "gelu": Of(F.gelu),
    "gelu_tanh": Of(lambda x: F.gelu(x, approximate="tanh")),
    "arithmetic": Of(lambda x: (2 - x) * x / (x.abs() + 1) - 3 * x.square() + x.exp().sqrt() + 1 / (x.abs() + 2)),
    "prelu": _of_layer(nn.PReLU(4)),
    "conv_transpose": _of_layer(nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)),
    "depthwise": _of_layer(nn.Conv2d(4, 4, (3, 1), padding=(2, 0), dilation=2, groups=4)),
    "conv1d": _of_layer(Inside(nn.Conv1d(4, 2, 3), lambda x, f: f(x.flatten(2)))),
    "same": _of_layer(nn.Conv2d(4, 5, 4, padding="same")),
    "pools": Of(lambda x: F.avg_pool2d(F.max_pool2d(x, 3, 2, 1), 3, 1, 1, count_include_pad=False).mean((2, 3))),
    "ceil": Of(lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True)),
    "gate": Of(lambda x: x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1)) + F.adaptive_max_pool2d(x, 1)),
    "reductions": Of(lambda x: x.sum(1, keepdim=True) + x.amax((2, 3), keepdim=True) + x.norm(dim=1, keepdim=True)),
    "softmax": Of(lambda x: x.softmax(1)),
    "parts": Of(lambda x: torch.cat([x[:, :1], x[:, 1:, 1:-1:2].repeat(1, 1, 1, 1)[:, :, :1], *x.chunk(2, 1)][2:], 1)),
    "select": Of(lambda x: x[:, 2] + torch.stack(x.split([1, 3], 1)[1].unbind(1), 1)[:, 0]),
    "shuffle": Of(lambda x: F.pixel_shuffle(x, 2)),
    "resize": Of(lambda x: F.interpolate(F.interpolate(x, scale_factor=2), (9, 11), mode="bilinear")),
    "padding": Of(lambda x: F.pad(F.pad(x, (1, 2, 0, 1), "reflect"), (1, 1, 1, 1), "replicate")),
    "resize_smoothly": Of(
        lambda x: F.interpolate(F.interpolate(x, scale_factor=1.3, mode="bicubic"), (9, 11), None, "bilinear", True)
    ),
    "resize_volume": Of(lambda x: F.interpolate(x.view(2, 2, 2, 8, 8), scale_factor=1.6, mode="trilinear")),
    "padding_around": Of(
        lambda x: F.pad(F.pad(x.view(2, 2, 2, 8, 8), (1, 2, 0, 1, 2, 1), "circular"), (1,) * 6, value=2.0)
    ),
    "matmul": Of(lambda x: x @ x.transpose(2, 3)),
    "layer_norm": _of_layer(Inside(nn.LayerNorm(4), _channels_last)),
    "linear": _of_layer(Inside(nn.Linear(4, 6), _channels_last)),
    "head": nn.Sequential(nn.Flatten(), nn.Linear(192, 5, bias=False), nn.BatchNorm1d(5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_torchs_exports_compute_torchs_results(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    compared(tmp_path, MODELS[name], IMAGE)


def test_modules_become_blocks_and_paths_labels(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Unit(4), Unit(4)), nn.Flatten(), nn.Linear(256, 3))
    imported = compared(tmp_path, net, IMAGE)
    assert "block stage on x {" in imported.source and "stage @1.0 |> stage @1.1" in imported.source
    assert {"1.0.conv.weight", "1.1.norm.running_var", "3.bias"} <= imported.network.arrays.keys()


def test_batch_norm_trains_with_torchs_momentum_and_dropout_drops(tmp_path: Path) -> None:
    norm = nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)
    imported = import_model(exported(tmp_path, nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.Dropout(0.2)), IMAGE), "net")
    assert "bn(eps=0.001, momentum=0.3)" in imported.source and "dropout(p=0.2)" in imported.source


def test_stochastic_depth(tmp_path: Path) -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if not self.training else x * (torch.empty(2, 1, 1, 1).bernoulli_(0.75) / 0.75)

    assert "drop_path(0.25)" in compared(tmp_path, _of_layer(Dropped()), IMAGE).source


def test_folded_batch_norms_are_reported(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    with pytest.warns(RuntimeWarning, match="batch norms that were folded into them cannot be rebuilt"):
        imported = compared(tmp_path, net, IMAGE, train=False)
    assert "bias=true" in imported.source and "bn" not in imported.source


def test_a_file_that_never_had_a_batch_norm_is_imported_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compared(tmp_path, nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), IMAGE, train=False)


def _imported(tmp_path: Path, nodes: Sequence[Any], held: dict[str, Any], **options: Any) -> ImportedModel:
    """Import a graph made by hand, and assert that it computes what ONNX's own evaluator says."""
    onnx_model = model(nodes, held, **options)
    imported = import_model(written(tmp_path, onnx_model), "net", "mse")
    (output,), (wanted,) = forward(imported, IMAGE), evaluated(onnx_model, IMAGE.numpy())
    assert output.shape == wanted.shape
    assert np.linalg.norm(output - wanted) <= 1e-5 * np.linalg.norm(wanted)
    return imported


def _weights(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_silu_is_found(tmp_path: Path) -> None:
    source = compared(tmp_path, MODELS["silu"], IMAGE).source
    assert all(word in source for word in ("silu", "hardswish", "mish")) and "sigmoid" not in source


@pytest.mark.parametrize("late", [False, True])
def test_gelu_that_is_spelt_out(late: bool, tmp_path: Path) -> None:
    half = [node("Mul", ["p", "half"], ["y"])] if late else []
    before = [] if late else [node("Mul", ["h", "half"], ["s"])]
    nodes = [
        node("Conv", ["x", "c.weight"], ["h"]), *before, node("Div", ["h", "root"], ["d"]), node("Erf", ["d"], ["e"]),
        node("Add", ["e", "one"], ["f"]), node("Mul", ["h" if late else "s", "f"], ["p" if late else "y"]), *half,
    ]  # fmt: skip
    held = {"c.weight": _weights(3, 3, 1, 1), "root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)}
    source = _imported(tmp_path, nodes, held, opset=17).source
    assert "gelu" in source and "+" not in source


def test_a_product_and_its_bias_are_one_layer(tmp_path: Path) -> None:
    nodes = [
        node("Flatten", ["x"], ["f"]), node("MatMul", ["f", "fc.weight"], ["m"]), node("Add", ["fc.bias", "m"], ["y"])
    ]  # fmt: skip
    imported = _imported(tmp_path, nodes, {"fc.weight": _weights(192, 5), "fc.bias": _weights(5)})
    assert "linear(5) @fc" in imported.source and imported.network.arrays["fc.weight"].shape == (5, 192)


@pytest.mark.parametrize("name", attention.SEQUENCES)
def test_attention_of_a_sequence(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, _ = attention.SEQUENCES[name]
    source = compared(tmp_path, attention.Tokens(make()), torch.randn(*attention.IMAGE)).source
    assert "|> attention(2" in source and ("causal=true" in source) == (name == "causal")


def test_parts_that_are_taken_with_their_axis_stay_so(tmp_path: Path) -> None:
    """One of two parts loses its axis and gets it again, so the parts stay a `chunk`."""
    nodes = [
        node("Conv", ["x", "w"], ["h"]), node("Split", ["h"], ["a", "b"], axis=1, num_outputs=2, name="parts"),
        node("Squeeze", ["a", "one"], ["s"]), node("Unsqueeze", ["s", "one"], ["u"]), node("Add", ["u", "b"], ["y"]),
    ]  # fmt: skip
    held = {"w": np.ones((2, 3, 1, 1), np.float32), "one": np.array([1])}
    onnx_model = model(nodes, held)
    imported = import_model(written(tmp_path, onnx_model), "net", "mse")
    (output,) = forward(imported, IMAGE)
    assert np.allclose(output, evaluated(onnx_model, IMAGE.numpy())[0], rtol=1e-5) and "chunk(2" in imported.source


def test_windows_with_unlike_sides(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "a.weight"], ["c"], auto_pad="SAME_UPPER", strides=[2, 2], name="conv"),
        node("MaxPool", ["c"], ["y"], kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    ]
    source = _imported(tmp_path, nodes, {"a.weight": _weights(4, 3, 4, 3)}).source
    assert "pad=(1, 1, 0, 1)" in source and "maxpool(2, stride=1, pad=(1, 0, 1, 0))" in source


def test_response_normalisation_is_torchs(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "a.weight"], ["c"]), node("LRN", ["c"], ["y"], size=3, alpha=0.5, beta=0.7, bias=2.0)
    ]  # fmt: skip
    weights = _weights(4, 3, 3, 3)
    imported = import_model(written(tmp_path, model(nodes, {"a.weight": weights})), "net", "mse")
    wanted = F.local_response_norm(F.conv2d(IMAGE, torch.from_numpy(weights)), 3, 0.5, 0.7, 2.0).numpy()
    (output,) = forward(imported, IMAGE)
    assert np.linalg.norm(output - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_group_norm_of_channels(tmp_path: Path) -> None:
    nodes = [node("GroupNormalization", ["x", "n.weight", "n.bias"], ["y"], num_groups=3)]
    _imported(tmp_path, nodes, {"n.weight": _weights(3), "n.bias": _weights(3)}, opset=21)


def test_shapes_that_are_computed(tmp_path: Path) -> None:
    """Exporters write `x.view(x.shape[0], -1)` in this way if the batch size is open."""
    nodes = [
        node("Shape", ["x"], ["s"]), node("Gather", ["s", "zero"], ["n"]), node("Unsqueeze", ["n", "axis"], ["r"]),
        node("Concat", ["r", "rest"], ["to"], axis=0), node("Reshape", ["x", "to"], ["f"]),
        node("Gemm", ["f", "fc.weight"], ["y"], transB=1),
    ]  # fmt: skip
    held = {"zero": np.int64(0), "axis": np.array([0]), "rest": np.array([-1]), "fc.weight": _weights(4, 192)}
    file = written(tmp_path, model(nodes, held, shape=("rows", 3, 8, 8)))
    imported = import_model(file, "net", batch=5)
    assert "network net(batch = 5)" in imported.source and "linear(4, bias=false) @fc" in imported.source
    with pytest.raises(MbcError, match=r"MBC353: .*leaves the size of a mini-batch open") as caught:
        import_model(file, "net")
    assert "--batch 32" in str(caught.value)
    with pytest.raises(MbcError, match=r"MBC353: --batch 5 is given, but .* states the size of a mini-batch"):
        import_model(written(tmp_path, model(nodes, held)), "net", batch=5)


def test_modules_that_torchs_newer_exporter_tells(tmp_path: Path) -> None:
    nodes: list[Any] = []
    for number in range(2):
        for kind, own in (("Conv", "conv"), ("Relu", "act")):
            value = f"v{len(nodes)}"
            held = [f"W{number}"] if kind == "Conv" else []
            imported = node(kind, [f"v{len(nodes) - 1}" if nodes else "x", *held], [value], name=f"n{len(nodes)}")
            scopes, classes = ["", f"units.{number}", f"units.{number}.{own}", "op"], ["a.Net", "a.Unit", "a.Own", "op"]
            imported.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
            imported.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=repr(classes))
            nodes.append(imported)
    imported = _imported(tmp_path, nodes, {"W0": _weights(3, 3, 1, 1), "W1": 2 * _weights(3, 3, 1, 1)}, output="v3")
    assert "block unit on x {" in imported.source and "unit @units.0 |> unit @units.1" in imported.source
    assert set(imported.network.arrays) == {"units.0.conv.weight", "units.1.conv.weight"}


def test_equal_weights_that_an_exporter_joined_are_apart(tmp_path: Path) -> None:
    nodes = [
        node("Identity", ["b"], ["b2"]), node("Conv", ["x", "a.weight", "b"], ["h"]),
        node("Conv", ["h", "c.weight", "b2"], ["y"]),
    ]  # fmt: skip
    with pytest.warns(RuntimeWarning, match="folded"):
        imported = _imported(
            tmp_path, nodes, {"a.weight": _weights(3, 3, 1, 1), "c.weight": _weights(3, 3, 3, 3), "b": _weights(3)}
        )
    assert len(imported.network.arrays) == 4


def test_the_source_is_compiled_as_any_other(tmp_path: Path) -> None:
    imported = compared(tmp_path, MODELS["head"], IMAGE)
    assert lowered(imported.source).network.outputs
    assert helper.make_opsetid("", 20).version == 20 and imported.network.writer.startswith("ONNX, pytorch")


def test_a_bias_of_one_number_is_trained(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
    imported = compared(tmp_path, net, IMAGE)
    assert "linear(1)" in imported.source.replace(", bias=true", "") and "3.bias" in imported.network.arrays
