"""Instructions that not every GPU has, by compute capability."""

from __future__ import annotations

import math
from enum import StrEnum
from types import MappingProxyType

from mbc.hardware.datasheet import capability_of


class Instruction(StrEnum):
    """A family of instructions that a kernel may need.

    Attributes:
        MMA_SYNC: Matrix products in bf16, fp16 and tf32 that one warp starts (mma.sync), with ldmatrix and cp.async.
            Turing has ldmatrix and mma.sync m16n8k8 in fp16, which no kernel of mbc uses alone.
        WGMMA: Matrix products that four warps start together from shared memory (wgmma), with TMA.
        CLUSTER: Thread-block clusters, whose blocks read each other's shared memory.
        TCGEN05: Matrix products that accumulate in tensor memory (tcgen05). No kernel of mbc uses them.
    """

    MMA_SYNC = "mma.sync"
    WGMMA = "wgmma"
    CLUSTER = "cluster"
    TCGEN05 = "tcgen05"

    @property
    def label(self) -> str:
        """Name for messages. GPUs that lack MMA_SYNC may have mma.sync, but not in these shapes and types."""
        if self is Instruction.MMA_SYNC:
            return "mma.sync m16n8k16 in fp16, mma.sync in bf16 and tf32, cp.async"
        return str(self)


# The first and the last compute capability with each family, in tenths. Source: PTX ISA, "Target ISA Notes" of
# mma.sync (bf16), wgmma.mma_async, barrier.cluster and tcgen05.mma. wgmma exists on 9.0 only.
_CAPABILITIES = MappingProxyType(
    {
        Instruction.MMA_SYNC: (80, math.inf),
        Instruction.WGMMA: (90, 90),
        Instruction.CLUSTER: (90, math.inf),
        Instruction.TCGEN05: (100, 110),
    }
)


def has_instruction(architecture: str, instruction: Instruction) -> bool:
    """Return whether GPUs of an architecture such as "sm_90" have the instructions of this family."""
    first, last = _CAPABILITIES[instruction]
    return first <= capability_of(architecture) <= last
