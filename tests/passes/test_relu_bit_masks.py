"""The gradient of ReLU from bit masks: where it applies, and that nothing else of a step changes."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ir.graph import TrainingGraph
from mbc.passes.check_graph import verify_training
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
from tests.graphs import training_graph
from tests.ir.execution import draw, execute, new_control

SOURCE = """
network small(batch = 3, channels = 16, classes = 3) {
  input image[batch, 2, 4, 5] : float
  input target[batch] : class
  x = image |> conv(channels, 3, pad=1) |> bn |> relu @alone
  y = x + (x |> conv(channels, 3, pad=1) |> bn) |> relu @first
  z = (y |> conv(channels, 3, pad=1) |> bn) + (y |> conv(channels, 1) |> bn) |> relu @second
  logits = z |> flatten |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = fp64 }
"""


def graph(**settings: str) -> TrainingGraph:
    return training_graph(SOURCE, *settings.items())


def test_residual_relus_of_whole_bytes():
    assert residual_relus(graph()) == ("first", "second")
    assert residual_relus(graph(channels="12")) == ()


@pytest.mark.parametrize("relus", [("first",), ("first", "second")])
def test_a_step_with_bit_masks_is_the_same_to_the_bit(relus: tuple[str, ...]):
    plain = graph()
    signed = mask_relus(plain, relus)
    verify_training(signed)
    assert sum(op.kind == "relu_backward_masked" for op in signed.train) == len(relus)
    start = draw(plain, np.random.default_rng(1)) | {"control": new_control()}
    actual, wanted = (
        execute(g.train, {name: value.type for name, value in g.values.items()}, start, g.batch)
        for g in (signed, plain)
    )
    assert actual.keys() - wanted.keys() == {
        f"{name}.mask" for name in (op.outputs[0] for op in plain.train) if f"{name}.mask" in signed.values
    }
    for name, value in wanted.items():
        assert actual[name].tobytes() == value.tobytes(), name
