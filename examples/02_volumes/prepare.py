"""Draw volumes of nested shapes with noise, and write them into the folders `images` and `labels` of train and test.

A volume has 20 to 28 voxels along each axis. In it is an octahedron, an ellipsoid or nearly a box of class 1, and in
this a smaller shape of class 2; everything else is class 0. Each class has one brightness, and the noise is so strong
that a voxel alone does not show its class: thresholds reach a Dice score of 0.38 at most.

    python prepare.py FOLDER [TRAINING_VOLUMES [TEST_VOLUMES]]
"""

import sys
from pathlib import Path

import numpy as np

SIDES = (20, 28)
NOISE = 1.0  # standard deviation; the classes have the brightness 0, 1 and 2
EXPONENTS = (1, 2, 6)  # of the norm whose ball a shape is


def is_inside(random: np.random.Generator, size: np.ndarray, centre: np.ndarray, radii: np.ndarray) -> np.ndarray:
    """Return which voxels are in a drawn shape. Centre and radii are shares of the volume."""
    places = (np.indices(tuple(size)) + 0.5) / size.reshape(3, 1, 1, 1)
    distances = np.abs(places - centre.reshape(3, 1, 1, 1)) / radii.reshape(3, 1, 1, 1)
    return (distances ** random.choice(EXPONENTS)).sum(axis=0) <= 1


def draw(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw a volume and its classes."""
    size = random.integers(*SIDES, 3, endpoint=True)
    radii = random.uniform(0.25, 0.45, 3)
    centre = random.uniform(radii, 1 - radii)
    outer = is_inside(random, size, centre, radii)
    shift = radii * random.uniform(-0.15, 0.15, 3)
    inner = outer & is_inside(random, size, centre + shift, radii * random.uniform(0.5, 0.7, 3))
    classes = outer.astype(np.uint8) + inner
    return (classes + random.normal(0, NOISE, size)).astype(np.float32), classes


def main(folder: Path, training: int = 40, test: int = 10) -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", training), ("test", test)):
        for name in ("images", "labels"):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            volume, classes = draw(random)
            np.save(folder / part / "images" / f"{number:03}.npy", volume[np.newaxis])  # one channel
            np.save(folder / part / "labels" / f"{number:03}.npy", classes)
        print(f"{folder / part}: {count} volumes")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
