"""Cases in NIfTI files: read as arrays are, refused if images and labels have unlike voxels, and predicted."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mbc.cli import main
from mbc.errors import MbcError
from mbc.ir.types import DType, TensorType
from mbc.train import nifti
from mbc.train.data import has_part, open_data
from mbc.train.inputs import Input
from mbc.train.share import whole_batch
from mbc.train.volumes import Volume

IMAGE = Input("image", TensorType((4, 2, 4, 6, 8), DType.FP32))
TARGET = Input("target", TensorType((4, 4, 6, 8), DType.INT32), 3, (255,))
AFFINE = np.array([[0, 2.5, 0, 7], [-1, 0, 0, 8], [0, 0, 1.5, 9], [0, 0, 0, 1]])


def test_without_nibabel(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(MbcError, match=r"MBC384: .*a.nii.gz' needs the package nibabel: "):
        Volume(tmp_path / "a.nii.gz", IMAGE, ())


@pytest.fixture
def nibabel():
    return pytest.importorskip("nibabel", reason="nibabel is not installed (pip install 'mbc-compiler[volumes]')")


@pytest.fixture
def folder(nibabel, tmp_path, monkeypatch) -> Path:
    """Write two cases as nnU-Net lays them out, and as arrays."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for sub in ("n/imagesTr", "n/labelsTr", "a/images", "a/labels"):
        Path(sub).mkdir(parents=True)
    for name, size, suffix in (("x", (9, 7, 12), ".nii.gz"), ("y", (4, 6, 5), ".nii")):
        image, labels = rng.integers(-900, 900, (2, *size)), rng.integers(0, 3, size)
        np.save(f"a/images/{name}.npy", image.astype(np.float32))
        np.save(f"a/labels/{name}.npy", labels)
        stored = np.moveaxis(image, 0, -1).astype(np.int16)
        nibabel.save(nibabel.Nifti1Image(stored, AFFINE), f"n/imagesTr/{name}_0000{suffix}")
        nibabel.save(nibabel.Nifti1Image(labels.astype(np.float64), AFFINE), f"n/labelsTr/{name}{suffix}")
    return tmp_path


def test_they_are_read_as_arrays_are(folder):
    parts = [open_data(place, (IMAGE, TARGET)).shuffled(whole_batch(4), 1, 2) for place in ("a", "n")]
    for one, other in zip(*parts, strict=True):
        assert [array.dtype for array in other.arrays] == [np.float32, np.int32]
        for array, same in zip(one.arrays, other.arrays, strict=True):
            np.testing.assert_array_equal(array, same)
    assert not has_part("n", (IMAGE, TARGET), "test")


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ([2, 1, 1, 1], "1 x 2.5 x 1.5 mm, PRS, origin [7.0, 8.0, 9.0]; 2 x 2.5 x 1.5 mm, PRS, origin [7.0, 8.0, 9.0]"),
        ([1, 1, -1, 1], "PRS, origin [7.0, 8.0, 9.0]; 1 x 2.5 x 1.5 mm, PRI, origin [7.0, 8.0, 9.0]"),
        ([1, 1, 1, 2], "; 1 x 2.5 x 1.5 mm, PRS, origin [14.0, 16.0, 18.0]"),
    ],
)
def test_labels_of_unlike_voxels_are_refused(folder, nibabel, scale, message):
    path = "n/labelsTr/x.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.asarray(nibabel.load(path).dataobj), AFFINE @ np.diag(scale)), path)
    with pytest.raises(MbcError) as caught:
        open_data("n", (IMAGE, TARGET))
    assert caught.value.code == "MBC383" and message in caught.value.message
    assert "'n/imagesTr/x_0000.nii.gz' and 'n/labelsTr/x.nii.gz' have unlike voxels: " in caught.value.message


def test_files_that_are_refused(folder, nibabel, monkeypatch):
    path = Path("n/labelsTr/x.nii.gz")
    good = path.read_bytes()
    half = np.asarray(nibabel.load(path).dataobj) / 2
    nibabel.save(nibabel.Nifti1Image(half, AFFINE), path)
    with pytest.raises(MbcError, match=r"MBC176: 'n/labelsTr/x.nii.gz' has labels that are no whole numbers"):
        open_data("n", (IMAGE, TARGET))
    for content in (good[:-60], b"", b"\x1f\x8b" + good[9:]):
        path.write_bytes(content)
        with pytest.raises(MbcError, match=r"MBC172: cannot read 'n/labelsTr/x.nii.gz': "):
            open_data("n", (IMAGE, TARGET))
    monkeypatch.setattr(nifti, "machine_memory_bytes", lambda: 100)
    with pytest.raises(MbcError, match=r"MBC172: cannot read .*: its size is .* more than this machine's memory"):
        open_data("n", (IMAGE, TARGET))


def test_predictions_keep_the_affine(folder, nibabel):
    Path("net.mbc").write_text(
        "network net(batch = 2) {\n  input image[batch, 2, 4, 6, 8] : float\n  input target[batch, 4, 6, 8] : class\n"
        "  y = image |> conv(3, 1)\n  output y\n  loss (y, target) |> softmax_cross_entropy\n}\n"
    )
    assert main(["train", "net.mbc", "--data", "n", "--epochs", "1", "--device", "cpu", "--checkpoint", "w"]) == 0
    predict = ["predict", "net.mbc", "--weights", "w", "--device", "cpu"]
    for words in (["n/imagesTr", "-o", "o"], ["n/imagesTr", "-o", "p", "--probabilities"], ["a/images", "-o", "o"]):
        assert main([*predict, "--data", *words]) == 0
    for name, suffix in (("x", ".nii.gz"), ("y", ".nii")):
        classes, probabilities = (nibabel.load(f"{out}/{name}{suffix}") for out in "op")
        assert np.allclose(classes.affine, AFFINE) and np.allclose(probabilities.affine, AFFINE)
        assert classes.get_data_dtype() == np.uint8 and probabilities.shape == (*classes.shape, 3)
        np.testing.assert_array_equal(classes.dataobj, np.load(f"o/{name}.npy"))
        np.testing.assert_array_equal(classes.dataobj, np.asarray(probabilities.dataobj).argmax(axis=-1))
