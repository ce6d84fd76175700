"""The lines that `mbc train` prints for an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.cli.train_view import View
from mbc.train.data import ArrayData
from mbc.train.epoch import Epoch


@pytest.mark.parametrize(
    ("waited_s", "said"),
    [(0.5, ""), (1.0, ""), (1.5, "waited for data 2% (1.5 s)"), (75, "waited for data 75% (1 min 15 s)")],
)
def test_waiting_for_data_is_said_where_it_is_more_than_a_hundredth(capsys, waited_s, said):
    epoch = Epoch(
        epoch=1, epochs=2, steps=5, loss=0.5, accuracy=None, test_accuracy=None, learning_rate=0.1, rows=1000,
        seconds=100, dropped_rows=0, bad_steps=0, waited_seconds=waited_s,
    )  # fmt: skip
    View(ArrayData((np.zeros(8),)), 8).on_epoch(epoch)
    assert capsys.readouterr().err == "  ".join(filter(None, ("epoch 1/2  loss 0.5000  10.0 images/s", said))) + "\n"
