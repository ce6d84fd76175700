"""Write the handwritten digits of scikit-learn as digits.train.npz and digits.test.npz.

1,797 images of 8x8 pixels. Every fifth image of each digit is held out for the test, so that both parts hold all
digits alike. The sixteen levels of grey become 0 to 1.

    python prepare.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits


def main(folder: Path) -> None:
    digits: Any = load_digits()  # a Bunch; its stub says a tuple, too
    images = (digits.images / 16).astype(np.float32)[:, np.newaxis]  # [1797, 1, 8, 8]
    labels = digits.target.astype(np.int32)
    held_out = np.zeros(len(labels), dtype=bool)
    generator = np.random.default_rng(0)
    for digit in range(10):
        held_out[generator.permutation(np.flatnonzero(labels == digit))[::5]] = True
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", ~held_out), ("test", held_out)):
        file = folder / f"digits.{name}.npz"
        np.savez(file, images=images[rows], labels=labels[rows])
        print(f"{file}: {np.count_nonzero(rows)} images")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
