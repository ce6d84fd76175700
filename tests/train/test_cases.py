"""Folders of cases: patches, equal when resumed and on several ranks; trained on, and predicted; bad files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mbc.cli import main
from mbc.errors import MbcError
from mbc.ir.types import DType, TensorType
from mbc.train.data import open_data
from mbc.train.evaluation import dice_scores, mean_score
from mbc.train.inputs import Input
from mbc.train.share import Share, whole_batch
from mbc.train.volumes import Volume

INPUTS = (Input("image", TensorType((4, 2, 4, 6, 8), DType.FP32)),
          Input("target", TensorType((4, 4, 6, 8), DType.INT32), 3, (255,)))  # fmt: skip
SOURCE = """network net(batch = 4) {
  input image[batch, 2, 4, 6, 8] : float  input target[batch, 4, 6, 8] : class
  y = image |> conv(3, 1, bias=true)
  output y
  loss (y, target) |> softmax_cross_entropy(ignore_index=255)
}"""
SIZES = {"a": (9, 7, 12), "b": (4, 6, 8), "c": (5, 3, 20)}  # `c` is smaller than a patch on one axis
TRAIN = ["train", "net.mbc", "--device", "cpu", "--lr", "0.1", "--data", ".", "--test", ".", "--checkpoint", "v"]
PREDICT = ["predict", "net.mbc", "--device", "cpu", "--weights", "w", "--data", "images", "-o"]
BAD = [  # in an order in which each comes before those left by the rows above
    ([*PREDICT, "w"], "labels/b", lambda x: x, "MBC386: cannot write 'w/a.npy': "),
    ([*PREDICT, "images", "--force"], "labels/b", lambda x: x, "MBC305: 'images/a.npy' exists already"),
    ([*PREDICT, "o", "--overlap", "1"], "labels/b", lambda x: x, "MBC380: images of 3 axes cannot be predicted with W"),
    ([*PREDICT, "o", "--data", "no"], "labels/b", lambda x: x, "MBC172: there is no .npy, .npz or .nii at 'no'"),
    ([*PREDICT, "o", "--labels", "no"], "labels/b", lambda x: x, "MBC172: there is no .npy, .npz or .nii at 'no'"),
    (TRAIN, "labels/d", lambda x: x, "MBC382: case 'd' has no file for input 'image'"),
    (TRAIN, "labels/b", lambda x: x[1:], "MBC383: 'images/b.npy' and 'labels/b.npy' have the shapes (2, 4, 6, 8) and"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Write cases whose voxels are numbered, and of which few have labels."""
    monkeypatch.chdir(tmp_path)
    Path("net.mbc").write_text(SOURCE)
    _ = [Path(part).mkdir() for part in ("images", "labels")]
    for number, (name, size) in enumerate(SIZES.items(), 1):
        voxels = np.arange(1.0, np.prod(size) + 1, dtype=np.float32).reshape(size)
        np.save(f"images/{name}.npy", [voxels / 1000, np.full(size, number, np.float32)])
        np.save(f"labels/{name}.npy", np.isin(voxels, [3, 40]) + 2 * (voxels == voxels.max()))


def test_patches():
    data, drawn = open_data(".", INPUTS), {}
    assert data.rows == 8  # (756 + 192 + 300) / 192 patches, in whole mini-batches
    for epoch in range(9):
        parts = [part.arrays for part in data.shuffled(whole_batch(4), 3, epoch)]
        for row, (image, label) in enumerate(zip(*map(np.concatenate, zip(*parts, strict=True)), strict=True)):
            real, name = image[1] > 0, "abc"[int(image[1].max()) - 1]
            at = np.unravel_index(np.round(image[0][real] * 1000).astype(int) - 1, SIZES[name])
            assert real.sum() == np.prod(np.minimum(SIZES[name], (4, 6, 8))) and (label[~real] == 255).all()
            np.testing.assert_array_equal(label[real], np.load(f"labels/{name}.npy")[at])
            assert row % 3 != 2 or (label[real] > 0).any()
            drawn.setdefault(name, set()).add(image[0].max())
        resumed = next(data.shuffled(whole_batch(4), 3, epoch, 1)).arrays
        halves = [list(data.shuffled(Share(4, at, at + 2, at // 2, 2), 3, epoch))[1].arrays for at in (0, 2)]
        for whole, again, *ranks in zip(parts[1], resumed, *halves, strict=True):
            np.testing.assert_array_equal([whole, whole], [again, np.concatenate(ranks)])
    assert len(drawn["a"]) > 10 and len(drawn["b"]) == 1 and len(drawn["c"]) > 5


@pytest.mark.parametrize(
    ("path", "change", "code", "message"),
    [
        ("labels/b.npy", lambda x: x * 2, "MBC232", "labels/b.npy' has class 4 at [3, 5, 7]: the network has 3"),
        ("labels/b.npy", lambda x: x + 0.5, "MBC176", "labels/b.npy' holds float64, but input 'target' needs integers"),
        ("images/b.npy", lambda x: x[:1], "MBC175", "(1, 4, 6, 8), but an image of input 'image' is [2, any, any"),
        ("images/b.npy", lambda x: x[None], "MBC383", "b.npy' have the shapes (1, 2, 4, 6, 8) and (4, 6, 8)"),
        ("images/b.npy", lambda x: np.array([None]), "MBC172", "images/b.npy': Array can't be memory-mapped"),
    ],
)
def test_files_that_do_not_fit(monkeypatch, path, change, code, message):
    monkeypatch.setattr("mbc.train.inputs._PART_ELEMENTS", 50)  # labels are checked in parts of one row
    np.save(path, change(np.load(path)))
    with pytest.raises(MbcError) as caught:
        open_data(".", INPUTS)
    assert caught.value.code == code and message in caught.value.message


def test_a_volume_without_channels_needs_an_axis_for_them():
    np.save("volume.npy", np.zeros((4, 6, 8), np.float32))
    for channels, remedy in ((1, "add an axis for the channel: array[None]"), (2, "put the channels first")):
        with pytest.raises(MbcError, match="MBC175") as caught:
            Volume(Path("volume.npy"), Input("image", TensorType((4, channels, 4, 6, 8), DType.FP32)), ())
        assert remedy in caught.value.remedy


def test_inputs_and_cases_that_have_no_patches():
    with pytest.raises(MbcError, match="MBC175: patches of cases need inputs of one size, but 'image' has"):
        open_data(".", (INPUTS[0], Input("target", TensorType((4,), DType.INT32))))
    for path in ("images/b.npy", "labels/b.npy"):
        np.save(path, np.load(path)[None])
    with pytest.raises(MbcError, match=r"MBC175: a case of .* is an array of several images"):
        open_data(".", INPUTS)


def test_they_are_trained_on_and_predicted(capsys):
    assert main([*TRAIN, "--epochs", "1"]) == main([*TRAIN[:-1], "w", "--epochs", "3"]) == 0
    assert main([*TRAIN, "--epochs", "3", "--resume", "v"]) == 0
    np.testing.assert_equal(load_file("v"), load_file("w"))
    assert main([*PREDICT, "out"]) == main([*PREDICT, "p", "--probabilities"]) == 0
    for name, size in SIZES.items():
        classes = np.load(f"out/{name}.npy")
        assert classes.dtype == np.uint8 and classes.shape == size
        np.testing.assert_array_equal(classes, np.load(f"p/{name}.npy").argmax(axis=0))
    capsys.readouterr()
    assert main([*PREDICT, "scored", "--labels", "labels", "--json"]) == 0
    report, arrays = json.loads(capsys.readouterr().out), [np.load(f"scored/{name}.npy") for name in SIZES]
    expected = [[2 * ((x == c) & (y == c)).sum() / max(1, (x == c).sum() + (y == c).sum()) for c in range(3)]
                for x, y in zip(arrays, (np.load(f"labels/{name}.npy") for name in SIZES), strict=True)]  # fmt: skip
    assert [report["cases"][name]["dice"] for name in SIZES] == [pytest.approx(row) for row in expected]
    assert report["dice"] == pytest.approx(np.mean(expected, axis=0)) and report["mean_dice"] is not None
    one = [*PREDICT, "one", "--data", "images/a.npy", "--labels", "labels/a.npy", "--mirror", "0,2"]
    assert main(one) == 0 and "one/a.npy\nclass  Dice\n    0  0." in capsys.readouterr().out
    for words, file, change, message in BAD:
        np.save(file, change(np.load("labels/b.npy")))
        assert main(words) == 1 and f"error {message}" in capsys.readouterr().err and not Path("o").exists()


def test_dice_scores_leave_out_ignored_and_absent_classes():
    labels = np.array([[0, 1, 1, 255], [2, 2, 255, 0]])
    classes = np.array([[0, 1, 2, 1], [2, 2, 2, 0]])
    target = Input("target", TensorType((2, 4), DType.INT32), 4, (255,))
    assert dice_scores(classes, labels, target) == (1.0, pytest.approx(2 / 3), pytest.approx(4 / 5), None)
    assert mean_score((None, 0.5, 1.0)) == 0.75 and mean_score((None,)) is None


def test_labels_of_rows_and_of_a_network_without_classes(capsys):
    images, labels = np.load("images/b.npy"), np.load("labels/b.npy")
    np.savez("rows.npz", images=np.stack([images] * 5), labels=np.stack([labels] * 5))
    np.savez("fewer.npz", labels=np.stack([labels] * 4))
    assert main([*TRAIN[:-1], "w", "--epochs", "1", "--data", "rows.npz"]) == 0
    predict = [*PREDICT, "o", "--data", "rows.npz", "--labels"]
    assert main([*predict, "rows.npz"]) == 0 and np.load("o/rows.npz")["predictions"].shape == (5, 4, 6, 8)
    assert main([*predict, "fewer.npz", "--force"]) == 1 and "error MBC383: " in capsys.readouterr().err
    Path("net.mbc").write_text(SOURCE.replace("target[batch, 4", "target[batch, 3, 4").replace(": class", ": float")
                               .replace("softmax_cross_entropy(ignore_index=255)", "mse"))  # fmt: skip
    assert main([*predict, "rows.npz", "--force"]) == 1
    assert "error MBC387: network 'net' predicts no class numbers that could be" in capsys.readouterr().err
