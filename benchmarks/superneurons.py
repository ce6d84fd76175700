"""Memory counted as SuperNeurons counts it (Wang et al., PPoPP 2018), for a network that is one chain of layers.

What it counts: the outputs of layers and their gradients, in fp32. Not the images, parameters, their gradients or
workspaces. A layer's backward needs its input, its output and both gradients; the gradients of ReLU, LRN and softmax
take the bytes of the gradients that come in.

Rules that its published figures for AlexNet follow to a hundredth of a percent:
* baseline: nothing shares memory, the data gradients do not either
* liveness: an output lives until the backward that reads it last: its layer's, or for convolutions and linear layers,
  which do not read what they put out, that of the next
* offload: outputs of convolutions are offloaded as soon as the next layer has read them, and prefetched while the next
  convolution or linear layer runs backward
* recompute: what lies between convolutions and linear layers is dropped, and recomputed once for each stretch where
  that stays below the largest layer, else again for every layer that needs it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mbc.ir.graph import Network

CHECKPOINTS = ("convolution", "linear")
IN_PLACE = ("relu", "lrn", "softmax_cross_entropy")
PUBLISHED_MIB = {"baseline": 2189.437, "liveness": 1489.355, "offload": 1132.155, "recompute": 886.385}


@dataclass(frozen=True)
class Layer:
    """`in_bytes`: of its input, which is the output of the layer before it."""

    name: str
    kind: str
    in_bytes: int
    out_bytes: int

    @property
    def checkpoint(self) -> bool:
        return self.kind in CHECKPOINTS

    @property
    def gradient_bytes(self) -> int:
        """Of the gradient it makes, where that is not the one it was given."""
        return 0 if self.kind in IN_PLACE else self.in_bytes


@dataclass(frozen=True)
class Moment:
    """What is in memory at one step: `what` runs (`>` forward, `<` backward, `*` again)."""

    what: str
    size_bytes: int


def chain(network: Network) -> list[Layer]:
    """The layers of a network that has no branch; biases belong to the layer before them."""
    layers: list[Layer] = []
    before = network.inputs[0]
    for operation in network.operations:
        if operation.inputs[0] != before:
            raise SystemExit(f"{network.name} is no chain: {operation.name} does not read {before}")
        in_bytes = network.values[before].type.size_bytes
        before = operation.outputs[0]
        if operation.kind == "bias_add" or not in_bytes:
            continue
        # The probabilities, which mbc never writes down, are what a softmax layer puts out.
        softmax = operation.kind == "softmax_cross_entropy"
        out_bytes = in_bytes if softmax else network.values[before].type.size_bytes
        layers.append(Layer(operation.name, operation.kind, in_bytes, out_bytes))
    return layers


def baseline(layers: Sequence[Layer]) -> list[Moment]:
    return [Moment("all", sum(layer.out_bytes + layer.gradient_bytes for layer in layers))]


def liveness(layers: Sequence[Layer]) -> list[Moment]:
    kept = 0
    moments: list[Moment] = []
    for layer in layers:
        kept += layer.out_bytes
        moments.append(Moment(f"> {layer.name}", kept))
    for layer in reversed(layers):
        read = 0 if layer.checkpoint else layer.out_bytes
        kept -= layer.out_bytes
        moments.append(Moment(f"< {layer.name}", kept + read + _gradients(layer)))
    return moments


def offload(layers: Sequence[Layer]) -> list[Moment]:
    moments: list[Moment] = []
    kept: dict[int, int] = {}
    for i, layer in enumerate(layers):
        kept[i] = layer.out_bytes
        moments.append(Moment(f"> {layer.name}", sum(kept.values())))
        if i and layers[i - 1].kind == "convolution":
            del kept[i - 1]
    for i, layer in reversed(list(enumerate(layers))):
        fetched = _convolution_before(layers, i) if layer.checkpoint else None
        if fetched is not None:
            kept[fetched] = layers[fetched].out_bytes
        own = kept.pop(i, 0)
        read = 0 if layer.checkpoint else own
        moments.append(Moment(f"< {layer.name}", sum(kept.values()) + read + _gradients(layer)))
    return moments


def largest_layer(layers: Sequence[Layer]) -> int:
    """Bytes of the layer that needs most by itself: input, output and gradients. For LRN they count two of these."""
    return max(
        layer.out_bytes + _gradients(layer) + (layer.in_bytes if i else 0)
        + (layer.in_bytes if layer.kind == "lrn" else 0)
        for i, layer in enumerate(layers)
    )  # fmt: skip


def recompute(layers: Sequence[Layer]) -> list[Moment]:
    """With offloading. Outputs of linear layers, which are small, stay."""
    limit_bytes = largest_layer(layers)
    moments: list[Moment] = []
    for i, layer in enumerate(layers):
        linear = sum(before.out_bytes for before in layers[:i] if before.kind == "linear")
        moments.append(Moment(f"> {layer.name}", linear + (layer.in_bytes if i else 0) + layer.out_bytes))
    last = len(layers)
    for start in reversed([i for i, layer in enumerate(layers) if layer.checkpoint]):
        linear = sum(before.out_bytes for before in layers[:start] if before.kind == "linear")
        once = _backward_of_stretch(layers, start, last, linear, again=False)
        each = _backward_of_stretch(layers, start, last, linear, again=True)
        moments += once if max(m.size_bytes for m in once) <= limit_bytes else each
        last = start
    return [*moments, Moment(f"< {layers[0].name}", _gradients(layers[0]))]


def _backward_of_stretch(
    layers: Sequence[Layer], start: int, stop: int, linear_bytes: int, again: bool
) -> list[Moment]:
    """Backward of the checkpoint `stop`, if there is one, which reads the end of the stretch, then of the layers
    between; `again`: outputs are made anew for each, else once for all. The checkpoint `start` is there throughout."""
    moments: list[Moment] = []
    held = linear_bytes + layers[start].out_bytes
    for i in range(min(stop, len(layers) - 1), start, -1):
        layer, made = layers[i], range(start + 1, i)
        coming = layer.out_bytes  # the gradient, which is there while outputs are recomputed
        if again:
            moments += [Moment(f"* {layers[j].name}", held + layers[j].in_bytes * (j > start + 1)
                               + layers[j].out_bytes + coming) for j in made]  # fmt: skip
            inputs = layer.in_bytes if i > start + 1 else 0
        else:
            inputs = sum(layers[j].out_bytes for j in made)
        # A checkpoint runs backward without its output.
        output = 0 if layer.checkpoint else layer.out_bytes
        moments.append(Moment(f"< {layer.name}", held + inputs + output + _gradients(layer)))
    return moments


def _gradients(layer: Layer) -> int:
    """Of its output, which it is given, and of its input. A loss is given none."""
    given = 0 if layer.kind == "softmax_cross_entropy" else layer.out_bytes
    return given + layer.gradient_bytes


def _convolution_before(layers: Sequence[Layer], i: int) -> int | None:
    """The convolution whose stretch the layer `i` ends."""
    before = [j for j in range(i) if layers[j].checkpoint]
    return before[-1] if before and layers[before[-1]].kind == "convolution" else None


MODES = {"baseline": baseline, "liveness": liveness, "offload": offload, "recompute": recompute}
