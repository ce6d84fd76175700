"""Cases of a folder: volumes of any size with their labels, of which patches of the network's input size are drawn.

A patch depends on seed, epoch and its number alone, so that a resumed training draws the same patches, on any number of
ranks. As in nnU-Net, every third patch is centred on a position of a drawn foreground class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

import numpy as np

from mbc.errors import MbcError
from mbc.ops.base import Array
from mbc.train.inputs import Batch, Input, check_classes, names_of
from mbc.train.nifti import SUFFIXES, grid
from mbc.train.share import Part, Share
from mbc.train.volumes import Volume

_FOREGROUND_EVERY = 3  # patches
_TOLERANCE_MM = 1e-3  # of the elements of affine matrices
_NNUNET = {"train": "Tr", "test": "Ts"}  # endings of nnU-Net's folders
_MOST_POSITIONS = 1000  # that are remembered of each class of a case


@dataclass(frozen=True, slots=True)
class Case:
    """A case.

    Attributes:
        volumes: The file of each input, in the order of the network's inputs.
        foreground: Of each class of labels that it has, the background left out, flat indices of some positions.
    """

    volumes: tuple[Volume, ...]
    foreground: tuple[Array, ...]


@dataclass(frozen=True)
class CaseData:
    """Patches of cases. A patch is padded where its case is smaller: images by 0, labels by an ignored class or 0."""

    inputs: tuple[Input, ...]
    cases: tuple[Case, ...]
    rows: int

    common = True

    def shuffled(self, share: Share, seed: int, epoch: int, after: int = 0) -> Iterator[Part]:
        """Return a rank's parts of the mini-batches of one epoch; all cases are drawn equally often."""
        rounds = range(ceil(self.rows / len(self.cases)))
        order = np.concatenate([_random(seed, epoch, 0, number).permutation(len(self.cases)) for number in rounds])
        for start in range(after * share.batch, self.rows, share.batch):
            rows = range(start, min(start + share.batch, self.rows))
            own = rows[share.first : share.stop]
            patches = [self._patch(self.cases[int(order[row])], row, _random(seed, epoch, 1, row)) for row in own]
            yield Part(tuple(map(np.stack, zip(*patches, strict=True))), len(rows), len(rows) == share.batch)

    def in_order(self, share: Share) -> Iterator[Batch]:
        """Return a rank's share of the same patches each time, up to `share.rows` at a time."""
        return (part.arrays for part in self.shuffled(share, 0, 0) if part.arrays)

    def _patch(self, case: Case, row: int, random: np.random.Generator) -> Batch:
        size, patch = np.array(case.volumes[0].size), np.array(patch_size(self.inputs))
        space = np.maximum(size - patch, 0)
        corner = random.integers(0, space + 1)
        if row % _FOREGROUND_EVERY == _FOREGROUND_EVERY - 1 and case.foreground:
            position = int(random.choice(case.foreground[random.integers(len(case.foreground))]))
            corner = np.clip(np.array(np.unravel_index(position, case.volumes[0].size)) - patch // 2, 0, space)
        before = np.maximum(patch - size, 0) // 2
        region = tuple(map(slice, corner, np.minimum(corner + patch, size)))
        widths = [*zip(before, np.maximum(patch - size, 0) - before, strict=True)]
        fills = [i.ignored[0] if i.ignored else 0 for i in self.inputs]
        blocks = [volume.read(region) for volume in case.volumes]
        widths = [[(0, 0)] * (block.ndim - len(patch)) + widths for block in blocks]
        return tuple(np.pad(b, w, constant_values=fill) for b, w, fill in zip(blocks, widths, fills, strict=True))


def _random(seed: int, epoch: int, purpose: int, number: int) -> np.random.Generator:
    # Each counter begins a sequence of its own.
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch], counter=[0, 0, purpose, number]))


def patch_size(inputs: Sequence[Input]) -> tuple[int, ...]:
    """Return the size that all inputs have in common; MBC175 if there is none."""
    sizes = {i.name: i.type.shape[1 if i.is_class else 2 :] for i in inputs}
    if len({*sizes.values()}) > 1 or not all(sizes.values()):
        shown = ", ".join(f"'{name}' has {list(size)}" for name, size in sizes.items())
        remedy = "give arrays with one row for each sample: an .npz, or a folder of .npy files"
        raise MbcError("MBC175", f"patches of cases need inputs of one size, but {shown}", remedy)
    return next(iter(sizes.values()))


def folder_of(place: Path, i: Input, inputs: Sequence[Input], part: str) -> Path | None:
    """Return the folder of an input's files in a folder of cases, such as `images` or `imagesTr`, or None."""
    endings = (f"_{part}", _NNUNET[part], "")
    names = [f"{name}{ending}" for name in names_of(i, inputs) for ending in endings]
    return next((place / name for name in names if (place / name).is_dir()), None)


def case_files(place: Path, i: Input, inputs: Sequence[Input], part: str) -> dict[str, Path]:
    """Return the files of an input by the names of their cases.

    Args:
        place: A file, a folder of files, or a folder with a folder of files for each input.
        i: The input.
        inputs: All inputs.
        part: `train` or `test`.

    Raises:
        MbcError: MBC172 if there are none.
    """
    folder = folder_of(place, i, inputs, part) or place
    paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    endings = (".npy", ".npz", *SUFFIXES)
    suffixes = [(path, next((end for end in endings if path.name.endswith(end)), "")) for path in paths]
    files = {path.name.removesuffix(suffix): path for path, suffix in suffixes if suffix and path.is_file()}
    if not files:
        raise MbcError("MBC172", f"there is no .npy, .npz or .nii at '{folder}'", "give a file, or a folder of them")
    # nnU-Net numbers the channels of images, but not of labels.
    return files if i.is_class else {name.removesuffix("_0000"): path for name, path in files.items()}


def open_cases(place: Path, inputs: tuple[Input, ...], part: str) -> CaseData:
    """Open all cases of a folder, and read their labels once.

    An epoch has whole mini-batches of patches that together are at least as large as all cases.

    Args:
        place: The folder.
        inputs: Inputs of the network.
        part: `train` or `test`.

    Raises:
        MbcError: MBC172, MBC175, MBC176, MBC232, and MBC382 to MBC384.
    """
    patch = patch_size(inputs)
    folders = [folder_of(place, i, inputs, part) for i in inputs]
    pairs = zip(folders, inputs, strict=True)
    files = [{} if folder is None else case_files(folder, i, inputs, part) for folder, i in pairs]
    cases = [open_case(name, files, inputs) for name in sorted(set[str]().union(*files))]
    if any(volume.rows is not None for case in cases for volume in case.volumes):
        raise MbcError("MBC175", f"a case of '{place}' is an array of several images", "write a file for each case")
    least = sum(prod(case.volumes[0].size) for case in cases) / prod(patch)
    batch = inputs[0].type.shape[0]
    return CaseData(inputs, tuple(cases), batch * ceil(max(len(cases), least) / batch))


def open_case(name: str, files: Sequence[Mapping[str, Path]], inputs: Sequence[Input]) -> Case:
    """Open the files of a case, and check that they fit the network and each other.

    Raises:
        MbcError: MBC382 if an input has no file, MBC383 if files differ in their voxels, MBC172, MBC175, MBC176, MBC232
            and MBC384.
    """
    volumes: list[Volume] = []
    foreground: list[Array] = []
    for i, of_input in zip(inputs, files, strict=True):
        if name not in of_input:
            remedy = "give each case a file of its name for each input: images/NAME.npy and labels/NAME.npy"
            raise MbcError("MBC382", f"case '{name}' has no file for input '{i.name}'", remedy)
        volume = Volume(of_input[name], i, names_of(i, inputs))
        volumes.append(volume)
        first = volumes[0]  # classes of whole images have no size
        if first.rows != volume.rows or (first.size and volume.size and first.size != volume.size):
            message = f"'{first.path}' and '{volume.path}' have the shapes {first.shape} and {volume.shape}"
            raise MbcError("MBC383", message, "give each image labels of its own voxels")
        one, other = first.affine, volume.affine
        if one is not None and other is not None and not np.allclose(one, other, atol=_TOLERANCE_MM):
            message = f"'{first.path}' and '{volume.path}' have unlike voxels: {grid(one)}; {grid(other)}"
            raise MbcError("MBC383", message, "resample one to the voxels of the other")
        if i.is_class:
            labels = volume.read()
            if i.classes is not None:
                check_classes(labels, i.classes, i.ignored, f"'{volume.path}'")
            classes = labels.reshape(-1)[places := np.flatnonzero(labels > 0)]  # few, so that they are sorted fast
            positions = (places[classes == number] for number in np.unique(classes) if number not in i.ignored)
            foreground += [one[:: ceil(len(one) / _MOST_POSITIONS)].copy() for one in positions]
    return Case(tuple(volumes), tuple(foreground))
