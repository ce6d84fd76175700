"""Biases that an instance norm subtracts again with the mean of each channel: nnU-Net's convolutions have such.

Without them a step stores one tensor less for each convolution. Their gradient is exactly zero; other programs compute
its rounding errors.
"""

from __future__ import annotations

from dataclasses import replace

from mbc.ir.graph import Network, Operation
from mbc.ops.group_norm import GroupNorm
from mbc.passes.uses import Uses


def without_vain_biases(network: Network) -> tuple[Network, tuple[str, ...]]:
    """Return the network without such additions of biases, and the biases that are not read any more.

    The additions stay in the network, but are not part of a training graph, because nothing reads them.
    """
    uses, written, biases = Uses.of(network), list[Operation](), list[str]()
    for operation in network.operations:
        addition = uses.sole(operation.inputs[0], "bias_add") if _is_instance_norm(operation, network) else None
        if addition is not None and uses.reads[addition.inputs[1]] == 1:
            biases.append(addition.inputs[1])
            operation = replace(operation, inputs=(addition.inputs[0], *operation.inputs[1:]))
        written.append(operation)
    return replace(network, operations=tuple(written)), tuple(biases)


def _is_instance_norm(operation: Operation, network: Network) -> bool:
    """Return whether an operation normalises each channel of each sample by itself."""
    if not isinstance(operation.attributes, GroupNorm):
        return False
    return operation.attributes.groups == network.values[operation.inputs[0]].type.shape[1]
