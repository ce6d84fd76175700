"""Attention in windows from ONNX, with tables and masks in the form that torch's exporters write.

The exporters also spell out rolls, single elements, and vectors with which several modules begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.interchange.importing import ImportedModel, import_model
from tests.interchange.models import Model, Tensor, forward, torch
from tests.interchange.onnx_files import compared, evaluated, exported, model, node, written
from tests.interchange.test_attention import IMAGE, Windows

pytestmark = pytest.mark.filterwarnings("ignore:.*folded:RuntimeWarning")


class Masked(Windows):
    """A block of Swin as in timm, whose mask is a buffer."""

    def __init__(self, shift: int) -> None:
        super().__init__(shift)
        self.register_buffer("hidden", super().mask(torch.zeros(1)))

    def mask(self, x: Tensor) -> Tensor:
        return self.hidden


class Unlike(Windows):
    """A window with a bias for each pair of pixels instead of one for each offset."""

    def __init__(self) -> None:
        super().__init__(0)
        self.table = torch.nn.Parameter(torch.randn(1, 2, 16, 16))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * 4**-0.5) @ k.transpose(-2, -1) + self.table


def network(kind: type[Windows], *arguments: Any) -> Model:
    torch.manual_seed(0)
    return kind(*arguments)


@pytest.mark.parametrize("folded", [False, True], ids=["written out", "folded"])
@pytest.mark.parametrize("kind, shift", [(Windows, 0), (Windows, 1), (Masked, 2)])
def test_windows_have_a_table_and_a_shift(kind: type[Windows], shift: int, folded: bool, tmp_path: Path) -> None:
    imported = compared(tmp_path, network(kind, shift), torch.randn(*IMAGE), train=not folded)
    shifted = f", size=8, shift={shift}" if shift else ""
    assert f"window_bias(2, 4{shifted}) @" in imported.source and "join_windows(8, 4)" in imported.source
    assert (f"roll({-shift})" in imported.source and f"roll({shift})" in imported.source) == bool(shift)
    tables = [array for name, array in imported.network.arrays.items() if array.shape == (49, 2)]
    assert len(tables) == 1 and not imported.network.frozen


def test_other_biases_are_refused(tmp_path: Path) -> None:
    file = exported(tmp_path, network(Unlike), torch.randn(*IMAGE), train=False)
    with pytest.raises(MbcError, match="MBC303") as caught:
        import_model(file, "net")
    assert "it adds a computed tensor to the scores" in str(caught.value)


def _compared(path: Path, nodes: Sequence[Any], held: dict[str, Any]) -> ImportedModel:
    onnx_model = model(nodes, held)
    imported = import_model(written(path, onnx_model), "net", "mse")
    image = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    (output,), (wanted,) = forward(imported, image), evaluated(onnx_model, image.numpy())
    assert output.shape == wanted.shape and np.allclose(output, wanted, rtol=1e-5, atol=1e-6)
    return imported


def _filters(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("first, words", [(6, "roll((2, 0))"), (2, "roll((-2, 0))")])
def test_a_roll_in_two_slices(first: int, words: str, tmp_path: Path) -> None:
    held = {"w": _filters(3, 3, 1, 1), "from": np.array([first]), "end": np.array([2**40]), "zero": np.array([0])}
    nodes = [
        node("Conv", ["x", "w"], ["h"]), node("Slice", ["h", "from", "end", "axis"], ["a"], name="behind"),
        node("Slice", ["h", "zero", "from", "axis"], ["b"], name="before"),
        node("Concat", ["a", "b"], ["y"], axis=2),
    ]  # fmt: skip
    source = _compared(tmp_path, nodes, {**held, "axis": np.array([2])}).source
    assert words in source and "slice" not in source
    nodes[-1] = node("Concat", ["b", "a"], ["y"], axis=2)  # in their order: nothing is rolled
    source = _compared(tmp_path, nodes, {**held, "axis": np.array([2])}).source
    assert "roll" not in source and "concat(axis=2)" in source


def test_one_element_and_all_elements_by_number(tmp_path: Path) -> None:
    held = {"w": _filters(3, 3, 1, 1), "one": np.array([1]), "two": np.array([2]), "flat": np.array([-1])}
    nodes = [
        node("Conv", ["x", "w"], ["h"]), node("Slice", ["h", "one", "two", "one"], ["a"]),
        node("Squeeze", ["a", "one"], ["s"]), node("Reshape", ["s", "flat"], ["f"]),
        node("Gather", ["f", "all"], ["y"]),
    ]  # fmt: skip
    source = _compared(tmp_path, nodes, {**held, "all": np.arange(128).reshape(2, 64)}).source
    assert source.count("slice") == 1 and "start=1, stop=2)" in source
    with pytest.raises(MbcError, match=r"the_Reshape.*it makes \[128\] of"):
        _compared(tmp_path, nodes, {**held, "all": np.arange(128)[::-1].reshape(2, 64)})


def test_modules_that_begin_with_one_vector_have_each_their_own(tmp_path: Path) -> None:
    nodes: list[Any] = []
    for number in range(2):
        imported = node("Conv", [f"v{number - 1}" if number else "x", f"W{number}", "b"], ["y" if number else "v0"])
        imported.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(["", f"units.{number}", "op"]))
        imported.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=repr(["a.Net", "a.Unit", "op"]))
        imported.name = f"n{number}"
        nodes.append(imported)
    filters = {"W0": _filters(3, 3, 1, 1), "W1": _filters(3, 3, 3, 3)}
    imported = _compared(tmp_path, nodes, {**filters, "b": np.ones(3, np.float32)})
    assert {n for n in imported.network.arrays if "bias" in n} == {"units.0.bias", "units.1.bias"}
    with pytest.raises(MbcError, match="its parameters are tied to those of"):
        _compared(tmp_path, nodes, {**filters, "b": np.arange(3, dtype=np.float32)})


def test_a_summand_of_a_scaled_product_is_no_bias_of_windows(tmp_path: Path) -> None:
    held = {"w": _filters(3, 3, 1, 1), "gain": _filters(1, 3, 1, 1), "shift": _filters(1, 3, 1, 1)}
    nodes = [
        node("Conv", ["x", "w"], ["h"]), node("Mul", ["h", "gain"], ["scaled"]),
        node("Add", ["scaled", "shift"], ["moved"], name="first"), node("Add", ["moved", "places"], ["y"]),
    ]  # fmt: skip
    imported = _compared(tmp_path, nodes, {**held, "places": np.zeros((1, 3, 8, 8), np.float32)})
    assert "window_bias" not in imported.source


def test_parts_of_channels_change_places(tmp_path: Path) -> None:
    held = {"w": _filters(3, 3, 1, 1), "from": np.array([1]), "end": np.array([3]), "zero": np.array([0])}
    nodes = [
        node("Conv", ["x", "w"], ["h"]), node("Slice", ["h", "from", "end", "axis"], ["a"], name="behind"),
        node("Slice", ["h", "zero", "from", "axis"], ["b"], name="before"),
        node("Concat", ["a", "b"], ["y"], axis=1),
    ]  # fmt: skip
    imported = _compared(tmp_path, nodes, {**held, "axis": np.array([1])})
    assert "roll(" not in imported.source and "concat" in imported.source
