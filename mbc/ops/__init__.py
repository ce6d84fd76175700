"""Every kind of operation and every layer of the language, collected from the files of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mbc.ops import (
    activation,
    bias,
    convolution,
    loss,
    matrix,
    normalization,
    pooling,
    random,
    response,
    shape,
    signs,
    update,
)
from mbc.ops.base import Layer, OpKind

_FAMILIES = (
    convolution,
    bias,
    matrix,
    normalization,
    activation,
    signs,
    random,
    pooling,
    response,
    shape,
    loss,
    update,
)

KINDS: Mapping[str, OpKind] = MappingProxyType({kind.name: kind for family in _FAMILIES for kind in family.OPS})
LAYERS: Mapping[str, Layer] = MappingProxyType({layer.name: layer for family in _FAMILIES for layer in family.LAYERS})
