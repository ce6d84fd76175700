"""Rules that translate ATen operations into the language.

* `base`: the call that a rule receives, with tensors in the shapes that the program sees
* `node_arguments`: the arguments of a node, which a call reads
* `written_layers`: the layers that a call writes
* `convolution`: convolutions and fully connected layers
* `normalization`: batch, layer, group and instance normalisation
* `renamings`: operations that are one layer of the language, as the layer's declaration says
* `activation`: elementwise layers, softmax, dropout and stochastic depth
* `arithmetic`: sums, products, differences, quotients, powers, products of matrices
* `moments`: normalisation and statistics that several layers compute together
* `pooling`: pooling, reductions and resampling
* `attention`: attention, as one operation or as products and softmax; taking tensors apart
* `choices`: comparisons, masks, maxima, clamps, casts
* `parameters`: arithmetic on parameters before a layer takes them
* `constants`: numbers that do not depend on the input
* `operation_schemas`: the schemas that PyTorch publishes, with defaults and aliases
* `views`: which results share memory, and how writes to views return to their base
* `operands`: the classes that stand for a tensor of the program
* `factors`: tensors viewed by the factors of their axes
* `shape`: shapes, orders of axes, shuffles
* `parts`: parts, concatenation, rolls, padding
* `axes`: padding, repetition and parts along any one axis
* `writes`: copies, and tensors of which a part is replaced
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mbc.interchange.aten import (
    activation,
    arithmetic,
    attention,
    axes,
    choices,
    constants,
    convolution,
    moments,
    normalization,
    parts,
    pooling,
    renamings,
    shape,
    writes,
)
from mbc.interchange.aten.base import Rule

_FAMILIES = (
    renamings, convolution, normalization, moments, activation, arithmetic, pooling, attention, choices,
    constants, shape, parts, axes, writes,
)  # fmt: skip

RULES: Mapping[str, Rule] = MappingProxyType({name: rule for f in _FAMILIES for name, rule in f.RULES.items()})
_CONTROL_FLOW = {
    "higher_order.cond": "take one of the branches: the layers that run must not depend on data",
    "higher_order.while_loop": "unroll the loop: the layers that run must not depend on data",
    "higher_order.scan": "unroll the loop",
    "higher_order.map_impl": "unroll the loop",
    "higher_order.wrap_with_set_grad_enabled": "leave torch.no_grad out, and freeze parameters by requires_grad=False",
    "higher_order.wrap_with_autocast": "leave autocast out, and choose the type with train { precision = bf16 }",
}
NOT_TAKEN: Mapping[str, str] = MappingProxyType(
    {name: text for f in _FAMILIES for name, text in f.NOT_TAKEN.items()} | _CONTROL_FLOW
)
