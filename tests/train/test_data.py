"""Sources of batches, and messages about data of the wrong form."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.ir.types import DType, TensorType
from mbc.runtime.arrays import Wanted, received
from mbc.train.data import ArrayData, check_place, has_part, open_data
from mbc.train.inputs import Input, converted, fit
from mbc.train.share import whole_batch

IMAGE = Input("image", TensorType((4, 1, 8, 8), DType.FP32))
TARGET = Input("target", TensorType((4,), DType.INT32))
INPUTS = (IMAGE, TARGET)
X = np.arange(10 * 64, dtype=np.float32).reshape(10, 1, 8, 8)
Y = np.arange(10) % 3


def batches(data, rows=4):
    return [tuple(part.shape[0] for part in batch) for batch in data.in_order(whole_batch(rows))]


@pytest.mark.parametrize("names", [("image", "target"), ("x", "y"), ("images", "labels"), ("x_train", "y_train")])
def test_npz(tmp_path, names):
    arrays: dict[str, Any] = dict(zip(names, (X, Y), strict=True))
    np.savez(tmp_path / "d.npz", **arrays)
    data = open_data(str(tmp_path / "d.npz"), INPUTS)
    assert data.rows == 10
    assert batches(data) == [(4, 4), (4, 4), (2, 2)]
    np.testing.assert_array_equal(np.concatenate([b[0] for b in data.in_order(whole_batch(4))]), X)


def test_folder_is_read_as_needed(tmp_path):
    np.save(tmp_path / "image.npy", X)
    np.save(tmp_path / "target.npy", Y)
    data = open_data(str(tmp_path), INPUTS)
    assert isinstance(data, ArrayData)
    assert isinstance(data.arrays[0].base, np.memmap) or isinstance(data.arrays[0], np.memmap)
    assert batches(data) == [(4, 4), (4, 4), (2, 2)]


def test_iterable(tmp_path, monkeypatch):
    (tmp_path / "batches_for_test.py").write_text(
        "import numpy as np\n"
        "def pairs():\n"
        "    for n in (3, 1, 9): yield np.ones((n, 1, 8, 8), np.float32), np.full(n, n)\n"
        "def dicts(epoch):\n"
        "    yield {'target': np.full(4, epoch), 'image': np.ones((4, 1, 8, 8))}\n"
        "def triples():\n"
        "    yield 1, 2, 3\n"
        "number = 3\n"
        "def nothing(): return None\n"
        "def ended(): yield from ()\n"
    )
    monkeypatch.chdir(tmp_path)
    data = open_data("batches_for_test:pairs", INPUTS)
    assert data.rows is None
    assert batches(data) == [(4, 4), (4, 4), (4, 4), (1, 1)]
    assert np.concatenate([b[1] for b in data.in_order(whole_batch(4))]).tolist() == [3] * 3 + [1] + [9] * 9
    (part,) = open_data("batches_for_test:dicts", INPUTS).shuffled(whole_batch(4), 0, 7)
    assert part.arrays[1].tolist() == [7] * 4
    with pytest.raises(MbcError, match="3 arrays a batch, but the network has 2 inputs: image, target") as caught:
        list(open_data("batches_for_test:triples", INPUTS).in_order(whole_batch(4)))
    assert caught.value.code == "MBC171"
    with pytest.raises(MbcError, match="batches_for_test:nothing returns None, which holds no batches") as caught:
        list(open_data("batches_for_test:nothing", INPUTS).in_order(whole_batch(4)))
    assert caught.value.code == "MBC171"
    with pytest.raises(MbcError, match=r"batches_for_test:ended yields no rows\nhelp: start again at each") as caught:
        list(open_data("batches_for_test:ended", INPUTS).shuffled(whole_batch(4), 0, 0))
    assert caught.value.code == "MBC233"
    labelled = (IMAGE, Input("target", TARGET.type, classes=9))
    with pytest.raises(MbcError, match=r"'target' of 'batches_for_test:pairs \(batch 3\)' has class 9 in row 0, and 8"):
        list(open_data("batches_for_test:pairs", labelled).in_order(whole_batch(4)))
    with pytest.raises(MbcError, match="number is not a function"):
        open_data("batches_for_test:number", INPUTS)
    with pytest.raises(MbcError, match="cannot import batches_for_test:missing"):
        open_data("batches_for_test:missing", INPUTS)


LOADERS = """
import numpy as np
ROW = np.ones((4, 1, 8, 8)), np.zeros(4, int)
def two(paths, batch): yield ROW
def other(epoch, batch): yield ROW
def named(epoch, /): yield ROW
def defaults(epoch, batch=3): yield ROW
def keywords(**settings): yield ROW
class Rows:
    def __iter__(self): return iter([ROW])
def raises():
    yield ROW
    raise ValueError("row 5 is bad")
def key(): return {}["x"]
def deep(): return np.zeros((2, 3)).reshape(5)
def ragged(): yield [[1], [1, 2]], ROW[1]
class Odd:
    def __array__(self, *_, **__): raise RuntimeError("on another device")
def odd(): yield {"image": Odd(), "target": ROW[1]}
def nothing(): yield None, None
def objects(): yield np.full((4, 1, 8, 8), None), ROW[1]
def words(): yield "image", "target"
def number(): yield 3
def text(): return "text"
def numbers(): return [1, 2]
def pairs(): return {"image": ROW[0], "target": ROW[1]}
"""


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("two", "MBC171", "two cannot be called: it takes (paths, batch) (missing a required argument: 'paths')"),
        ("other", "MBC171", "other cannot be called: it takes (epoch, batch) (missing a required argument: 'batch')"),
        ("named", "MBC171", "named cannot be called: it takes (epoch, /) ("),
        ("raises", "MBC171", "raises raises ValueError: row 5 is bad (loaders_for_test.py, line 13)"),
        ("key", "MBC171", "key raises KeyError: 'x' (loaders_for_test.py, line 14)"),
        ("deep", "MBC171", "(5,) (loaders_for_test.py, line 15)"),
        ("ragged", "MBC171", "ragged (batch 1) yields a list for 'image' that is not an array: "),
        ("odd", "MBC171", "odd (batch 1) yields an Odd for 'image' that is not an array: on another device"),
        ("nothing", "MBC175", "(batch 1)' has the shape (), but input 'image' needs rows of the shape (1, 8, 8)"),
        ("objects", "MBC176", "(batch 1)' holds object, but input 'image' needs floating-point numbers"),
        ("words", "MBC175", "(batch 1)' has the shape ()"),
        ("number", "MBC171", "yields 1 arrays a batch, but the network has 2 inputs: image, target"),
        ("text", "MBC171", "yields 1 arrays a batch"),
        ("numbers", "MBC171", "yields 1 arrays a batch"),
        ("pairs", "MBC171", "yields 1 arrays a batch"),
    ],
)
def test_functions_that_yield_no_batches(tmp_path, monkeypatch, function, code, message):
    (tmp_path / "loaders_for_test.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "loaders_for_test", raising=False)
    with pytest.raises(MbcError) as caught:
        list(open_data(f"loaders_for_test:{function}", INPUTS).shuffled(whole_batch(4), 0, 0))
    assert caught.value.code == code and message in caught.value.message
    assert f"loaders_for_test:{function}" in caught.value.message
    if "cannot be called" in message:
        with pytest.raises(MbcError, match="without arguments, or with some of `epoch`, `rank`"):
            check_place(f"loaders_for_test:{function}")


@pytest.mark.parametrize("function", ["defaults", "keywords", "Rows"])
def test_functions_that_can_be_called(tmp_path, monkeypatch, function):
    (tmp_path / "loaders_for_test.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "loaders_for_test", raising=False)
    check_place(f"loaders_for_test:{function}")
    assert batches(open_data(f"loaders_for_test:{function}", INPUTS)) == [(4, 4)]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("def batches(:", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    ],
)
def test_modules_that_cannot_be_imported(tmp_path, monkeypatch, content, why):
    (tmp_path / "broken_for_test.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(MbcError, match="cannot import broken_for_test:batches: ") as caught:
        check_place("broken_for_test:batches")
    assert caught.value.code == "MBC172" and why in caught.value.message


def test_a_folder_that_is_named_like_a_package_hides_none(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('this is not Python')\n")
    (tmp_path / "uses_for_test.py").write_text("import colorsys\ndef batches(): yield 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    check_place("uses_for_test:batches")
    assert sys.modules["colorsys"].__file__ != str(tmp_path / "colorsys.py")


@pytest.mark.parametrize("place", [None, 3, b"x", "x" * 5000, "a\0b", "", ".", ".:f", "..x:f"])
def test_places_that_are_none(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MbcError):
        open_data(place, INPUTS)


def test_data_without_rows(tmp_path):
    np.savez(tmp_path / "d.npz", image=X[:0], target=Y[:0])
    for part in ("train", "test"):
        with pytest.raises(MbcError, match=r"the data of '.*d.npz' have no rows") as caught:
            open_data(str(tmp_path / "d.npz"), INPUTS, part)
        assert caught.value.code == "MBC233"


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_class_that_there_is_not_is_named_by_its_row(tmp_path, wrong):
    labels = Y.copy()
    labels[7] = wrong
    np.savez(tmp_path / "d.npz", image=X, target=labels)
    with pytest.raises(MbcError) as caught:
        open_data(str(tmp_path / "d.npz"), (IMAGE, Input("target", TARGET.type, classes=3)))
    assert caught.value.code == "MBC232"
    assert f"d.npz' has class {wrong} in row 7: the network has 3 classes, 0 to 2" in caught.value.message


def test_test_part_of_one_file(tmp_path):
    np.savez(tmp_path / "d.npz", x_train=X, y_train=Y, x_test=X[:3], y_test=Y[:3])
    file = str(tmp_path / "d.npz")
    assert has_part(file, INPUTS, "test")
    assert open_data(file, INPUTS, "test").rows == 3
    assert open_data(file, INPUTS).rows == 10
    np.savez(tmp_path / "e.npz", x=X, y=Y)
    assert not has_part(str(tmp_path / "e.npz"), INPUTS, "test")


def test_axes_of_length_one_may_be_left_out():
    images, _ = fit({"image": X[:, 0], "target": Y}, INPUTS, "d")
    assert images.shape == (10, 1, 8, 8)


@pytest.mark.parametrize(
    ("arrays", "code", "message"),
    [
        ({"image": X}, "MBC173", "'d' has no array for input 'target' (it has: image)"),
        ({}, "MBC173", "(it has: none)"),
        ({"image": X, "target": Y[:9]}, "MBC174", "differ in their rows: image 10, target 9"),
        ({"image": X[:, :, :7], "target": Y}, "MBC175", "needs rows of the shape (1, 8, 8)"),
        ({"image": X, "target": Y.astype(np.float32)}, "MBC176", "holds float32, but input 'target' needs integers"),
        ({"image": X.astype(str), "target": Y}, "MBC176", "needs floating-point numbers"),
        (
            {"image": (255 * X).astype(np.uint8), "target": Y},
            "MBC176",
            "holds uint8, but input 'image' needs floating-point",
        ),
        ({"image": X.astype(np.int64), "target": Y}, "MBC176", "holds int64, but input 'image' needs floating-point"),
    ],
)
def test_arrays_that_do_not_fit(arrays, code, message):
    with pytest.raises(MbcError) as caught:
        fit(arrays, INPUTS, "d")
    assert caught.value.code == code
    assert message in str(caught.value)


def test_channels_last_is_recognised():
    colour = Input("image", TensorType((4, 3, 8, 6), DType.FP32))
    with pytest.raises(MbcError, match=r"numpy\.moveaxis"):
        fit({"image": np.zeros((5, 8, 6, 3))}, (colour,), "d")


def test_aliases_only_where_they_are_unambiguous():
    other = Input("second", IMAGE.type)
    with pytest.raises(MbcError, match=r"has no array for input 'image' \(it has: x, y\)\nhelp: name it image$"):
        fit({"x": X, "y": Y}, (IMAGE, other, TARGET), "d")


@pytest.mark.parametrize("name", ["nothing.npz", "nothing", "a:"])
def test_no_such_data(name):
    with pytest.raises(MbcError, match=f"there is no data '{name}'") as caught:
        open_data(name, INPUTS)
    assert caught.value.code == "MBC172"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not an archive", b"hello"])
def test_files_that_are_no_archives(tmp_path, content):
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(MbcError, match="cannot read"):
        open_data(str(tmp_path / "d.npz"), INPUTS)


def test_pickles_are_refused(tmp_path):
    np.savez(tmp_path / "d.npz", image=np.array([{}], dtype=object), target=Y)
    with pytest.raises(MbcError, match="cannot read"):
        open_data(str(tmp_path / "d.npz"), INPUTS)


def test_single_array_is_no_archive(tmp_path):
    with (tmp_path / "d.npz").open("wb") as file:
        np.save(file, X)
    with pytest.raises(MbcError, match="single array"):
        open_data(str(tmp_path / "d.npz"), INPUTS)


def test_batches_take_the_types_of_the_inputs():
    images, target = converted((X.astype(np.uint8), Y.astype(np.int64)), INPUTS)
    assert images.dtype == np.float32 and target.dtype == np.int32
    with pytest.raises(MbcError, match="beyond 32 bits") as caught:
        converted((X, np.full(10, 2**32)), INPUTS)
    assert caught.value.code == "MBC176"


@pytest.mark.parametrize("given", ["?", "i1", "u1", "i4", "i8", "u4", "f2", "f4", "f8", "c8", "U1", "O"])
@pytest.mark.parametrize("wanted", [DType.FP32, DType.FP64, DType.INT32, DType.UINT8])
def test_data_sets_take_the_elements_that_a_step_takes(wanted, given):
    array = np.ones((4, 3)).astype(given)
    kind = TensorType((4, 3), wanted)

    def refusal(call):
        try:
            call()
        except MbcError as error:
            return error.remedy
        return None

    of_step = refusal(lambda: received(Wanted("x", kind, True), array, None))
    of_data = refusal(lambda: fit({"x": array}, (Input("x", kind),), "d.npz"))
    assert of_step == of_data
    taken = {DType.INT32: "iu", DType.UINT8: "u"}.get(wanted, "f")
    assert (of_step is None) == (array.dtype.kind in taken and (wanted is not DType.UINT8 or given == "u1"))
