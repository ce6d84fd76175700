"""ONNX operators on drawn attributes and inputs, compared with the standard.

Each operator gives the result of ONNX's own evaluator, or a refusal that names the unsupported part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.interchange.from_onnx import read
from mbc.interchange.from_onnx.operator import Operator
from mbc.interchange.importing import ImportedModel, import_model
from tests.interchange.models import forward, nn, torch
from tests.interchange.onnx_files import evaluated, exported, model, node, written

pytestmark = pytest.mark.filterwarnings("ignore:.*folded:RuntimeWarning")
Array = np.ndarray[Any, Any]


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def _imported(
    path: Path, last: Any, x: Array, held: Mapping[str, Any] | None, opset: int
) -> tuple[Any, ImportedModel, Array]:
    """Return a model of `last` after a product with a parameter, its import, and the imported network's result."""
    ones = np.ones((1, *x.shape[1:]), np.float32)
    nodes = [node("Mul", ["x", "ones"], ["h"], name="first"), last]
    onnx_model = model(nodes, {"ones": ones, **(held or {})}, shape=x.shape, opset=opset)
    imported = import_model(written(path, onnx_model), "net", "mse")
    (output,) = forward(imported, x)
    return onnx_model, imported, output


def computed(path: Path, last: Any, x: Array, held: Mapping[str, Any] | None = None, opset: int = 20) -> Array:
    """Return mbc's result of `last`, for operators that ONNX's evaluator does not compute as the standard says."""
    return _imported(path, last, x, held, opset)[2]


def taken(path: Path, last: Any, x: Array, held: Mapping[str, Any] | None = None, opset: int = 20) -> str:
    """Import `last`, assert that its result is that of ONNX's evaluator, and return its source."""
    onnx_model, imported, output = _imported(path, last, x, held, opset)
    (wanted,) = evaluated(onnx_model, x)
    assert output.shape == wanted.shape
    assert np.allclose(output, wanted, rtol=1e-4, atol=1e-5)
    return imported.source


def refusal(path: Path, last: Any, x: Array, held: Mapping[str, Any] | None = None, opset: int = 20) -> str:
    with pytest.raises(MbcError, match="MBC303") as caught:
        taken(path, last, x, held, opset)
    return str(caught.value)


# ---- Resize ----

COORDINATES = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners")


def _resize(rng: np.random.Generator) -> tuple[Any, Array, dict[str, Any]]:
    """Return a random Resize of images [2, 2, H, W]."""
    shape = (2, 2, *(int(n) for n in rng.integers(2, 8, 2)))
    mode = str(rng.choice(["nearest", "linear", "cubic"]))
    more: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": str(rng.choice(COORDINATES))}
    if mode == "nearest":
        more["nearest_mode"] = str(rng.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]))
    else:
        more["antialias"] = int(rng.integers(2))
        more["exclude_outside"] = int(rng.integers(2)) if mode == "cubic" else 0
    if mode == "cubic":
        more["cubic_coeff_a"] = float(rng.choice([-0.75, -0.5]))
    inputs, held = ["h", "", "", ""], dict[str, Any]()
    axes = [2, 3] if rng.integers(2) else [0, 1, 2, 3]
    if rng.integers(2):
        scales = [*(1.0,) * (len(axes) - 2), *(float(s) for s in rng.choice([0.5, 0.7, 1.0, 1.5, 1.7, 2.0], 2))]
        inputs[2], held["s"] = "s", np.array(scales, np.float32)
    else:
        sizes = [*shape[: len(axes) - 2], *(int(n) for n in rng.integers(2, 12, 2))]
        inputs[3], held["s"] = "s", np.array(sizes)
        if len(axes) == 2:
            more["keep_aspect_ratio_policy"] = str(rng.choice(["stretch", "not_larger", "not_smaller"]))
    inputs = [name if name != "" or n < 2 else "" for n, name in enumerate(inputs)]
    if len(axes) == 2:
        more["axes"] = axes
    return node("Resize", ["s" if name == "s" else name for name in inputs], ["y"], **more), drawn(*shape), held


def test_resize_is_onnxs_or_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(60):
        last, x, held = _resize(rng)
        try:
            taken(tmp_path, last, x, held)
        except MbcError as error:
            assert error.code == "MBC303" and (
                "differ, and its coordinates" in error.message or "rounding decides" in error.message
            )
        else:
            count += 1
    assert count >= 40


def test_resize_by_factors_without_a_whole_size_as_torch_exports_it(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=1.7, mode="bilinear"))
    image = torch.rand(2, 3, 9, 9)
    imported = import_model(exported(tmp_path, net, image), "net", "mse")
    (output,) = forward(imported, image)
    with torch.no_grad():
        wanted = net(image).numpy()
    assert output.shape == wanted.shape == (2, 4, 15, 15) and np.allclose(output, wanted, rtol=1e-4, atol=1e-5)


def test_resize_keeps_the_layer_of_the_language(tmp_path: Path) -> None:
    last = node("Resize", ["h", "", "s"], ["y"], mode="linear")
    source = taken(tmp_path, last, drawn(2, 3, 4, 6), {"s": np.array([1, 1, 2, 1.5], np.float32)})
    assert "upsample(size=(8, 9), mode=bilinear)" in source
    for mode, coordinates, factor, layer in (
        ("linear", "align_corners", 1.5, "size=(8, 9), mode=bilinear, align_corners=true"),
        ("cubic", "half_pixel", 1.5, "size=(8, 9), mode=bicubic"),
        ("cubic", "half_pixel", 1.4, "factor=(2, 1.4), mode=bicubic"),
        ("cubic", "align_corners", 1.5, "size=(8, 9), mode=bicubic, align_corners=true"),
    ):
        last = node("Resize", ["h", "", "s"], ["y"], mode=mode, coordinate_transformation_mode=coordinates)
        source = taken(tmp_path, last, drawn(2, 3, 4, 6), {"s": np.array([1, 1, 2, factor], np.float32)})
        assert f"upsample({layer})" in source
    last = node("Resize", ["h", "", "s"], ["y"], mode="cubic", cubic_coeff_a=-0.5)
    source = taken(tmp_path, last, drawn(2, 3, 4, 6), {"s": np.array([1, 1, 2, 1.5], np.float32)})
    assert "upsample" not in source and "frozen" in source


def test_resize_takes_a_part_of_the_input(tmp_path: Path) -> None:
    roi = np.array([0, 0, 0.4, -0.2, 1, 1, 1.3, 0.7], np.float32)
    last = node(
        "Resize", ["h", "roi", "", "s"], ["y"], mode="linear", coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=5.0,
    )  # fmt: skip
    taken(tmp_path, last, drawn(2, 3, 4, 6), {"roi": roi, "s": np.array([2, 3, 5, 4])})


def test_resize_of_samples_and_of_edges_that_rounding_decides(tmp_path: Path) -> None:
    held = {"s": np.array([2, 1, 1, 1], np.float32)}
    assert "it resizes dimension 0, the samples" in refusal(
        tmp_path, node("Resize", ["h", "", "s"], ["y"]), drawn(2, 3, 4, 4), held
    )
    held = {"s": np.array([1, 1, 1.7, 1], np.float32)}
    last = node(
        "Resize", ["h", "", "s"], ["y"], mode="nearest", coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )  # fmt: skip
    assert "rounding decides which of two pixels is nearest" in refusal(tmp_path, last, drawn(2, 3, 20, 4), held)


# ---- PRelu, Gemm ----


@pytest.mark.parametrize("slope", [(4,), (4, 1), (4, 1, 1), (1,), (1, 1, 4), (1, 1, 1), (4, 4, 4)])
def test_slopes_are_broadcast_from_the_last_axis(slope: tuple[int, ...], tmp_path: Path) -> None:
    source = taken(tmp_path, node("PRelu", ["h", "s"], ["y"]), drawn(2, 4, 4, 4), {"s": drawn(*slope)})
    assert ("prelu" in source) == (slope in ((4, 1, 1), (1,), (1, 1, 1)))


@pytest.mark.parametrize("factors", [(1.0, 1.0), (2.0, 0.5), (0.5, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("c", [None, (), (1,), (5,), (1, 5), (1, 1)])
@pytest.mark.parametrize("turned", [0, 1])
def test_gemm(factors: tuple[float, float], c: tuple[int, ...] | None, turned: int, tmp_path: Path) -> None:
    held = {"b": drawn(5, 6) if turned else drawn(6, 5)} | ({} if c is None else {"c": drawn(*c)})
    last = node("Gemm", ["h", *held], ["y"], alpha=factors[0], beta=factors[1], transB=turned)
    taken(tmp_path, last, drawn(3, 6), held)


@pytest.mark.parametrize("c", [(3, 1), (3, 5)])
def test_gemm_whose_c_differs_between_samples(c: tuple[int, ...], tmp_path: Path) -> None:
    message = refusal(tmp_path, node("Gemm", ["h", "b", "c"], ["y"]), drawn(3, 6), {"b": drawn(6, 5), "c": drawn(*c)})
    assert f"its C {list(c)} differs between the samples" in message


# ---- single attributes ----


@pytest.mark.parametrize("alpha", [-1.5, -0.1, 0.0, 0.1, 2.0])
@pytest.mark.parametrize("kind", ["LeakyRelu", "Elu"])
def test_slopes_of_any_sign(kind: str, alpha: float, tmp_path: Path) -> None:
    taken(tmp_path, node(kind, ["h"], ["y"], alpha=alpha), drawn(2, 3, 4, 4))


@pytest.mark.parametrize("exponent", [1.0, 2.0, -1.0])
def test_powers(exponent: float, tmp_path: Path) -> None:
    taken(tmp_path, node("Pow", ["h", "e"], ["y"]), drawn(2, 3), {"e": np.float32(exponent)})


def test_a_part_without_elements(tmp_path: Path) -> None:
    nodes = [
        node("Mul", ["x", "w"], ["h"]), node("Split", ["h", "s"], ["a", "b"], axis=1), node("Relu", ["a"], ["y"]),
    ]  # fmt: skip
    onnx_model = model(nodes, {"w": drawn(1, 3), "s": np.array([3, 0])}, shape=(2, 3))
    with pytest.raises(MbcError, match="one of its results has no elements"):
        import_model(written(tmp_path, onnx_model), "net", "mse")


# ---- what a rule does not read ----


@pytest.mark.parametrize(
    "last, words",
    [
        (node("Relu", ["h"], ["y"], strange=1), "its attribute 'strange' is 1"),
        (node("LayerNormalization", ["h", "w"], ["y"], stash_type=16), "its attribute 'stash_type' is 16"),
        (node("Conv", ["h", "f"], ["y"], kernel_shape=[3, 3]), "its 'kernel_shape' differs"),
    ],
)
def test_attributes_that_no_rule_reads_are_refused(last: Any, words: str, tmp_path: Path) -> None:
    held = {"w": drawn(4), "f": drawn(4, 3, 1, 1)}
    assert words in refusal(tmp_path, last, drawn(2, 3, 4, 4), held)


def test_a_rule_that_forgets_something_refuses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def forgetful(op: Operator) -> None:
        weight = op.held(1, "weight", (1, 0))
        op.emit("aten.linear.default", input=op.tensor(0), weight=weight, bias=None)

    monkeypatch.setattr(read, "RULES", {**read.RULES, "Gemm": forgetful})
    held = {"b": drawn(6, 5), "c": drawn(5)}
    taken(tmp_path, node("Gemm", ["h", "b"], ["y"], transB=0, alpha=1.0), drawn(3, 6), {"b": held["b"]})
    assert "its input 'C' is not supported" in refusal(tmp_path, node("Gemm", ["h", *held], ["y"]), drawn(3, 6), held)
    last = node("Gemm", ["h", "b"], ["y"], alpha=2.0)
    assert "its attribute 'alpha' is 2.0, which is not supported" in refusal(tmp_path, last, drawn(3, 6), held)


def test_attributes_with_the_schemas_default_are_not(tmp_path: Path) -> None:
    last = node("MaxPool", ["h"], ["y"], kernel_shape=[2, 2], ceil_mode=0, storage_order=0, auto_pad="NOTSET")
    assert "maxpool" in taken(tmp_path, last, drawn(2, 3, 4, 4))


@pytest.mark.parametrize(
    "last", [node("MaxPool", ["h"], ["p", "y"], kernel_shape=[2, 2]), node("Dropout", ["h"], ["d", "y"])]
)
def test_outputs_that_no_rule_gives_are_refused(last: Any, tmp_path: Path) -> None:
    onnx_model = model(
        [node("Mul", ["x", "w"], ["h"], name="first"), last], {"w": drawn(1, 3, 4, 4)}, shape=(2, 3, 4, 4)
    )
    onnx_model.graph.output[0].type.tensor_type.elem_type = 0
    with pytest.raises(MbcError, match="is used"):
        import_model(written(tmp_path, onnx_model), "net", "mse")


def test_long_names(tmp_path: Path) -> None:
    long = "layer" * 20
    nodes = [node("Conv", ["x", f"{long}.weight"], [f"{long}.output"], name=f"/{long}/Conv")]
    onnx_model = model(nodes, {f"{long}.weight": drawn(3, 3, 1, 1)}, output=f"{long}.output")
    imported = import_model(written(tmp_path, onnx_model), "net", "mse")
    x = drawn(2, 3, 8, 8)
    (output,), (wanted,) = forward(imported, x), evaluated(onnx_model, x)
    assert np.allclose(output, wanted, atol=1e-5) and [key.name for key in imported.network.keys] == [f"{long}.weight"]
