"""Gradients of a planned model that can be differentiated again: PyTorch repeats the forward pass for them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from mbc.pytorch.model_tensors import output_tensors

torch: Any = importlib.import_module("torch")


def differentiable(model: Any, inputs: Sequence[Any], gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Return the gradients of `sources` with a graph.

    The gradient of a tensor that needs none, or on which no output depends, is None. Running statistics stay as they
    are, because the forward pass of the plan has changed them already.

    Args:
        model: The model, as it was in the forward pass of the plan; it draws no random numbers.
        inputs: The inputs of the model in the forward pass of the plan.
        gradients: The gradients of the outputs, None for outputs that the loss does not read.
        sources: The inputs and parameters whose gradients are returned.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.enable_grad():
        outputs = output_tensors(model.__class__.forward(model, *inputs))
    for buffer, before in buffers:
        buffer.data.copy_(before)  # without a new version, because the graph holds the buffer
    numbers = [number for number, gradient in enumerate(gradients) if gradient is not None]
    needed = [source for source in sources if source.requires_grad]
    read, given = [outputs[n] for n in numbers], [gradients[n] for n in numbers]
    derivatives = iter(torch.autograd.grad(read, needed, given, create_graph=True, allow_unused=True))
    return [next(derivatives) if source.requires_grad else None for source in sources]
