"""Every operation, planned and interpreted in float64, against PyTorch's autograd: needs torch, which mbc does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gradients import EXACT_LIMIT, OPERATION_LIMIT, compare, operation_limit
from modules import Job, with_full_norms
from operations import CASES, source

from mbc.source import Source

# Of these the rounded gradients are compared, too: operations of any rank.
NEAR = [
    "broadcast", "sub", "div", "permute", "shuffle", "split", "unused_part", "slice", "stack", "padding_zero",
    "padding_reflect", "padding_replicate", "adaptive_avgpool", "adaptive_maxpool", "global_maxpool", "elementary",
    "pow", "gelu_tanh", "prelu", "instance_norm", "softmax", "amax", "matmul",
]  # fmt: skip


def test_gradients_of_every_operation_in_float64() -> None:
    text = Source("operations", source("operations", CASES))
    job = Job("operations", text, (("train.precision", "fp64"),), gpu="h200")
    rows = compare("operation", job, "fp64", "cpu", job.plan(), "cpu")
    assert [row["name"] for row in rows] == [case.name for case in CASES]
    assert not [row for row in rows if max(row["worst"], row["loss_error"], row["statistics"]) > EXACT_LIMIT]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_shapes_and_broadcasting_keep_the_rule(precision: str) -> None:
    cases = [case for case in CASES if case.name in NEAR]
    assert len(cases) == len(NEAR)
    job = Job(
        "operations", Source("operations", source("operations", cases)), (("train.precision", precision),), gpu="h200"
    )
    for row in compare("operation", job, precision, "cpu", job.plan(), "cpu"):
        assert row["worst"] <= operation_limit(row["name"], precision), row


def test_limits_of_formats() -> None:
    assert operation_limit("sigmoid", "fp32") == operation_limit("relu", "fp32") == OPERATION_LIMIT
    assert operation_limit("sigmoid", "bf16") == 8 * 2**-8
    assert operation_limit("maxpool", "fp16") == operation_limit("relu", "tf32") == 3 * 2**-5.5


def test_batch_norms_get_enough_values() -> None:
    text = """network n(batch = 2) {{
  input image[batch, 3, 6, 6] : float
  input target[batch] : class
  logits = image |> conv(4, 3, stride=2, pad=1) {norm} |> flatten |> linear(5)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}
"""
    job = Job("n", Source("n", text.format(norm="|> bn")))
    assert with_full_norms(job).settings == (("batch", "4"),)  # 4 rows of 3 x 3 pixels: at least 32
    plain = Job("n", Source("n", text.format(norm="")))
    assert with_full_norms(plain) is plain
