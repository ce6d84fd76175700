"""ONNX operators that other layers replace, beside ONNX's own evaluator, with random shapes and attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interchange.onnx_files import node
from tests.interchange.test_onnx_standard import computed, drawn, refusal, taken

pytestmark = pytest.mark.filterwarnings("ignore:.*folded:RuntimeWarning")
Held = dict[str, Any]


# ---- reductions ----


@pytest.mark.parametrize("kind", ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"])
def test_reductions_over_any_axes_but_samples(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        shape = (2, *(int(n) for n in rng.integers(1, 5, 3)))
        axes = np.sort(rng.choice([1, 2, 3], int(rng.integers(1, 4)), replace=False)) - (4 if rng.integers(2) else 0)
        x = np.abs(drawn(*shape)) + 0.1 if kind == "LogSum" else drawn(*shape)
        last = node(f"Reduce{kind}", ["h", "axes"], ["y"], keepdims=int(rng.integers(2)))
        taken(tmp_path, last, x, {"axes": axes})
    assert "dimension 0 of [2, 3], the samples" in refusal(
        tmp_path, node(f"Reduce{kind}", ["h", "axes"], ["y"]), drawn(2, 3), {"axes": np.array([0, 1])}
    )


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
def test_softmax_over_one_axis_or_before_opset_13_several(kind: str, tmp_path: Path) -> None:
    x = 10 * drawn(2, 3, 4, 5)
    for axis in (1, 2, 3):
        taken(tmp_path, node(kind, ["h"], ["y"], axis=axis), x)
        flat = x.reshape(*x.shape[:1], int(np.prod(x.shape[1:axis])), -1).astype(np.float64)
        shares = np.exp(flat - flat.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        output = computed(tmp_path, node(kind, ["h"], ["y"], axis=axis), x, opset=11)
        wanted = (shares if kind == "Softmax" else np.log(shares)).reshape(x.shape)
        assert np.allclose(output, wanted, rtol=1e-4, atol=1e-6)


# ---- functions of each element ----


@pytest.mark.parametrize(
    "last",
    [
        node("Selu", ["h"], ["y"]), node("Selu", ["h"], ["y"], alpha=2.0, gamma=3.0), node("Celu", ["h"], ["y"]),
        node("Celu", ["h"], ["y"], alpha=0.5), node("Softsign", ["h"], ["y"]), node("Cosh", ["h"], ["y"]),
        node("Mean", ["h", "h", "h"], ["y"]), node("Sum", ["h", "h"], ["y"]),
    ],
)  # fmt: skip
def test_functions_of_each_element(last: Any, tmp_path: Path) -> None:
    taken(tmp_path, last, 2 * drawn(2, 3, 4, 4))


def test_swish_of_any_alpha(tmp_path: Path) -> None:
    taken(tmp_path, node("Swish", ["h"], ["y"], alpha=1.7), drawn(2, 3, 4), opset=24)


# ---- normalisation ----


@pytest.mark.parametrize("axis", [1, 2, 3, -1, -2])
def test_layer_and_rms_norm_over_any_last_axes(axis: int, tmp_path: Path) -> None:
    x = drawn(2, 3, 4, 5)
    held = {"w": drawn(*x.shape[axis:]), "b": drawn(*x.shape[axis:], seed=1)}
    for inputs in (["h", "w", "b"], ["h", "w"]):
        taken(
            tmp_path,
            node("LayerNormalization", inputs, ["y"], axis=axis, epsilon=0.1),
            x,
            {n: held[n] for n in inputs[1:]},
        )
    taken(tmp_path, node("RMSNormalization", ["h", "w"], ["y"], axis=axis), x, {"w": held["w"]}, opset=23)


def test_group_norm_of_groups_before_opset_21(tmp_path: Path) -> None:
    held = {"w": drawn(2), "b": drawn(2, seed=1)}
    taken(tmp_path, node("GroupNormalization", ["h", "w", "b"], ["y"], num_groups=2), drawn(2, 4, 3, 3), held)


# ---- shapes and parts ----


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (2, 7, 5), (2, 6)])
def test_pads_of_any_axis_and_sign(mode: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Negative pads cut elements off before the other pads are added.

    ONNX's evaluator calls NumPy, which refuses negative pads, so the reference cuts these elements off itself.
    """
    rng = np.random.default_rng(len(shape))
    for _ in range(5):
        pads = np.array([(0, *(int(n) for n in rng.integers(-1, 3, len(shape) - 1))) for _ in range(2)])
        pads[:, 1:] = np.minimum(pads[:, 1:], np.array(shape[1:]) - 2)
        number = np.float32(rng.choice([0.0, 1.5, -np.inf]))
        held = {"pads": pads.reshape(-1)} | ({"number": number} if mode == "constant" else {})
        x = drawn(*shape)
        output = computed(tmp_path, node("Pad", ["h", *held], ["y"], mode=mode), x, held)
        cut = x[tuple(slice(max(-b, 0), n - max(-a, 0)) for b, a, n in zip(*pads, shape, strict=True))]
        more = {"constant_values": number} if mode == "constant" else {}
        pad: Any = np.pad
        assert np.array_equal(output, pad(cut, pads.clip(0).T, mode, **more))


@pytest.mark.parametrize("index", [[2, 0, 1], [[0, 2], [-1, -1]], [0, 2, 4, 5]])
def test_elements_by_constant_numbers(index: Any, tmp_path: Path) -> None:
    taken(tmp_path, node("Gather", ["h", "i"], ["y"], axis=1), drawn(2, 6, 4), {"i": np.array(index)})
    taken(tmp_path, node("Gather", ["h", "i"], ["y"], axis=-1), drawn(2, 3, 4, 6), {"i": np.array(index)})


def test_slices_backwards(tmp_path: Path) -> None:
    held = {"s": np.array([-1, 3]), "e": np.array([-(2**63), 0]), "a": np.array([1, 2]), "t": np.array([-1, -2])}
    taken(tmp_path, node("Slice", ["h", "s", "e", "a", "t"], ["y"]), drawn(2, 5, 6), held)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space_and_back(mode: str, tmp_path: Path) -> None:
    taken(tmp_path, node("DepthToSpace", ["h"], ["y"], blocksize=2, mode=mode), drawn(2, 8, 3, 4))
    taken(tmp_path, node("SpaceToDepth", ["h"], ["y"], blocksize=2), drawn(2, 3, 4, 6))


@pytest.mark.parametrize("sizes", [(2, 5, 3), (2, 2, 9), (2, 3, 4)])
def test_center_crop_and_pad(sizes: tuple[int, ...], tmp_path: Path) -> None:
    taken(tmp_path, node("CenterCropPad", ["h", "to"], ["y"]), drawn(2, 4, 6), {"to": np.array(sizes)})


def test_tiles_and_expanded_tensors(tmp_path: Path) -> None:
    taken(tmp_path, node("Tile", ["h", "n"], ["y"]), drawn(2, 3, 4), {"n": np.array([1, 2, 3])})
    taken(tmp_path, node("Expand", ["h", "to"], ["y"]), drawn(2, 1, 4), {"to": np.array([2, 3, 4])})


# ---- windows ----


@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pools(p: int, tmp_path: Path) -> None:
    taken(tmp_path, node("LpPool", ["h"], ["y"], kernel_shape=[2, 3], strides=[1, 2], p=p), drawn(2, 3, 6, 7))
    taken(tmp_path, node("LpPool", ["h"], ["y"], kernel_shape=[3], p=p), drawn(2, 3, 9))


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "GlobalAveragePool"])
def test_pools_of_rows(kind: str, tmp_path: Path) -> None:
    more = {} if kind.startswith("Global") else {"kernel_shape": [3], "strides": [2]}
    taken(tmp_path, node(kind, ["h"], ["y"], **more), drawn(2, 3, 9))


def test_the_largest_of_all_elements(tmp_path: Path) -> None:
    x = drawn(2, 3, 9)
    assert np.array_equal(computed(tmp_path, node("GlobalMaxPool", ["h"], ["y"]), x), x.max(2, keepdims=True))


@pytest.mark.parametrize(
    "more",
    [
        {}, {"pads": [0, 1, 1, 2]}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"},
        {"output_padding": [1, 0], "pads": [1, 1, 1, 1], "dilations": [2, 1]},
    ],
)  # fmt: skip
def test_transposed_convolutions(more: dict[str, Any], tmp_path: Path) -> None:
    last = node("ConvTranspose", ["h", "w"], ["y"], strides=[2, 2], **more)
    taken(tmp_path, last, drawn(2, 3, 4, 5), {"w": drawn(3, 2, 3, 3)})


def test_convolutions_of_rows(tmp_path: Path) -> None:
    taken(tmp_path, node("Conv", ["h", "w"], ["y"], pads=[0, 2]), drawn(2, 3, 9), {"w": drawn(4, 3, 3)})
    taken(tmp_path, node("ConvTranspose", ["h", "w"], ["y"], strides=[2]), drawn(2, 3, 9), {"w": drawn(3, 4, 3)})


def test_windows_that_the_language_has_otherwise(tmp_path: Path) -> None:
    for pads, reason in ([2, 0, 0, 0], "without any pixel"), ([0, 0, 0, 2], "any pixel"), ([0, -1, 1, 0], "negative"):
        last = node("MaxPool", ["h"], ["y"], kernel_shape=[2, 2], pads=pads)
        assert reason in refusal(tmp_path, last, drawn(2, 3, 6, 6))
    last = node("MaxPool", ["h"], ["y"], kernel_shape=[17, 17])
    assert "more than 256 pixels" in refusal(tmp_path, last, drawn(1, 1, 20, 20))


# ---- products and attention ----


def test_products_with_held_matrices_on_either_side(tmp_path: Path) -> None:
    taken(tmp_path, node("MatMul", ["w", "h"], ["y"]), drawn(2, 3, 4, 5), {"w": drawn(6, 4)})
    taken(tmp_path, node("MatMul", ["h", "w"], ["y"]), drawn(2, 3, 4), {"w": drawn(4)})
    taken(tmp_path, node("MatMul", ["h", "w"], ["y"]), drawn(2, 3, 4), {"w": drawn(4, 5)})


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_of_one_tensor(causal: int, heads: int, tmp_path: Path) -> None:
    last = node(
        "Attention", ["h", "h", "h", "mask"], ["y"], q_num_heads=heads, kv_num_heads=heads, is_causal=causal,
        softcap=2.0, scale=0.5,
    )  # fmt: skip
    mask = np.ones((5, 5), bool)
    mask[2:, 1] = False
    taken(tmp_path, last, drawn(2, 5, 8), {"mask": mask}, opset=23)


def test_a_mask_of_numbers_is_trained(tmp_path: Path) -> None:
    last = node("Attention", ["h", "h", "h", "mask"], ["y"])
    assert "parameter((" in taken(tmp_path, last, drawn(2, 3, 5, 4), {"mask": drawn(5, 5)}, opset=23)
    hidden = np.where(np.tri(5, dtype=bool), 0.0, -np.inf).astype(np.float32)
    assert "constant(" in taken(tmp_path, last, drawn(2, 3, 5, 4), {"mask": hidden}, opset=23)


def test_queries_that_see_nothing(tmp_path: Path) -> None:
    last = node("Attention", ["h", "h", "h", "mask"], ["y"])
    message = refusal(tmp_path, last, drawn(2, 3, 5, 4), {"mask": np.eye(5, k=1, dtype=bool)}, opset=23)
    assert "some of its queries attend to no key" in message


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("width", [0, 4])
def test_rotary_embeddings(interleaved: int, width: int, tmp_path: Path) -> None:
    table = drawn(10, (width or 8) // 2)
    held = {"c": np.cos(table), "s": np.sin(table), "p": np.tile(np.array([1, 3, 5]), (2, 1))}
    last = node(
        "RotaryEmbedding", ["h", "c", "s", "p"], ["y"], interleaved=interleaved, rotary_embedding_dim=width,
    )  # fmt: skip
    taken(tmp_path, last, drawn(2, 2, 3, 8), held, opset=23)
