"""The tables of `mbc check`."""

from __future__ import annotations

import json
import math

from mbc.equivalence.operations import OperationComparison
from mbc.equivalence.rule import Comparison, Reference
from mbc.equivalence.run_step import Part
from mbc.equivalence.step_variants import divisions
from mbc.report.equivalence import divisions_text, operations_text, step_document, step_text
from tests.equivalence.test_operations import operation_pairs
from tests.runtime.nets import small_plan

FOUND = (
    Comparison(Part.GRADIENT, "stage0.conv1.weight", 3e-2, 3e-2, 1e-3, 4.2e-3, True),
    Comparison(Part.LOSS, "loss", 0.0, 1e-7, 1e-7, 5.2e-6, True),
    Comparison(Part.GRADIENT, "stage0.conv1.bias", math.inf, 8.0, 7.0, 14.0, False),
)


def cells(text):
    return [line.split() for line in text.splitlines()]


def test_a_row_names_its_tensor_and_its_verdict():
    rows = cells(step_text(FOUND, Reference.FLOAT64))
    assert rows[0] == ["tensor", "of", "distance", "error", "undivided's", "allowed"]
    assert rows[2] == ["stage0.conv1.weight", "gradient", "3.0e-02", "3.0e-02", "1.0e-03", "4.2e-03", "FAILS"]
    assert rows[3] == ["loss", "loss", "0", "1.0e-07", "1.0e-07", "5.2e-06", "ok"]
    assert rows[4] == ["stage0.conv1.bias", "gradient", "inf", "8.0e+00", "7.0e+00", "-", "rounding"]


def test_each_reference_has_its_columns():
    assert cells(step_text(FOUND, Reference.PERTURBED))[0] == ["tensor", "of", "distance", "perturbed", "allowed"]
    assert cells(step_text(FOUND, Reference.NONE))[0] == ["tensor", "of", "distance", "allowed"]


def test_narrow_tables_and_limits():
    text = step_text(FOUND, Reference.FLOAT64, width=72, limit=1)
    lines = text.splitlines()
    assert max(map(len, lines[:3])) <= 72 and "… and 2 tensors that are further from their limits" in lines


def test_json_has_no_infinity():
    rows = json.loads(json.dumps(step_document(FOUND), allow_nan=False))
    assert [row["passed"] for row in rows] == [False, True, True]
    assert rows[2]["distance"] is None and rows[0]["undivided_error"] == 1e-3


def test_divisions_are_counted():
    rows = cells(divisions_text(divisions(small_plan("fp32", 4))))
    assert rows[2][:3] == ["4", "+", "2"] and rows[2][3] == "7"
    assert rows[2][4:] == ["convolution,", "convolution_backward_data,", "convolution_backward_filter"]


def test_operations():
    pair = operation_pairs()[0]
    text = operations_text(
        [OperationComparison(pair, 2e-6, 1e-6), OperationComparison(pair, None, 5e-6), OperationComparison(pair, 0, 1)],
        limit=2,
    )
    rows = cells(text)
    assert rows[2][-3:] == ["2.0e-06", "1.0e-06", "FAILS"] and rows[3][-3:] == ["does", "not", "fit"]
    assert rows[2][:4] == ["first", "and", "1", "alike"] and "4 + 2" in text
    assert "… and 1 operations that are further from their limits" in text
