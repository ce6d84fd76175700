"""Which GPUs have which instructions."""

from __future__ import annotations

import pytest

from mbc.hardware.instructions import Instruction, has_instruction

AMPERE = {Instruction.MMA_SYNC}
HOPPER = {Instruction.MMA_SYNC, Instruction.CLUSTER, Instruction.WGMMA}
CONSUMER_BLACKWELL = {Instruction.MMA_SYNC, Instruction.CLUSTER}
BLACKWELL = {*CONSUMER_BLACKWELL, Instruction.TCGEN05}


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("sm_75", set()), ("sm_80", AMPERE), ("sm_86", AMPERE), ("sm_87", AMPERE), ("sm_89", AMPERE), ("sm_90", HOPPER),
     ("sm_90a", HOPPER), ("sm_100", BLACKWELL), ("sm_110", BLACKWELL), ("sm_120", CONSUMER_BLACKWELL),
     ("sm_121a", CONSUMER_BLACKWELL)],
)  # fmt: skip
def test_instructions_of_each_compute_capability(architecture: str, expected: set[Instruction]) -> None:
    assert {i for i in Instruction if has_instruction(architecture, i)} == expected
