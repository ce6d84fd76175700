"""A small classifier around the layers that a test of a pass writes."""

from __future__ import annotations

from mbc.ir.graph import TrainingGraph
from mbc.passes.check_graph import verify_training
from tests.graphs import training_graph


def graph(body: str, precision: str = "fp32") -> TrainingGraph:
    """Return the verified training graph for images [4, 3, 6, 5], whose `body` computes `y`."""
    text = f"""
network small(batch = 4) {{
  input image[batch, 3, 6, 5] : float
  input target[batch] : class
{body}
  logits = y |> flatten |> linear(3)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}
train {{ optimizer = sgd(momentum=0.9)  precision = {precision} }}
"""
    step = training_graph(text)
    verify_training(step)
    return step
