"""A share of ONNX's own tests of operators: none gives wrong results, and the judge finds faults."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytest.importorskip("onnx", reason="the tests of operators are in the package onnx, an extra")

import onnx_node_tests as node_tests

from mbc.errors import MbcError
from mbc.interchange.from_onnx import read
from mbc.interchange.from_onnx.operator import Operator

SHARE = 8  # one test in so many runs here
LEAST_EQUAL = 60


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    return node_tests.load_cases()


def _judged(cases: list[Any], name: str, folder: Path) -> node_tests.Outcome:
    return node_tests.judge(next(case for case in cases if case.name == name), folder)


def test_a_share_is_equal_or_refused(cases: list[Any], tmp_path: Path) -> None:
    share = [case for case in cases if zlib.crc32(case.name.encode()) % SHARE == 0]
    outcomes = [node_tests.judge(case, tmp_path) for case in share]
    wrong = [o for o in outcomes if o.verdict not in (node_tests.EQUAL, node_tests.REFUSED)]
    assert not wrong
    assert sum(o.verdict == node_tests.EQUAL for o in outcomes) >= LEAST_EQUAL


def test_the_judge_finds_fault(cases: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def other(op: Operator) -> None:
        op.emit("aten.abs.default", self=op.tensor())

    def broken(op: Operator) -> None:
        raise AssertionError("a rule that fails")

    def refused(*arguments: Any) -> Any:
        raise MbcError("MBC304", "the source that was written is refused", "report it")

    assert _judged(cases, "test_relu", tmp_path).verdict == node_tests.EQUAL
    verdicts: list[str] = []
    for rule in (other, broken):
        monkeypatch.setattr(read, "RULES", {**read.RULES, "Relu": rule})
        verdicts.append(_judged(cases, "test_relu", tmp_path).verdict)
    monkeypatch.setattr(node_tests, "import_model", refused)
    verdicts.append(_judged(cases, "test_relu", tmp_path).verdict)
    assert verdicts == [node_tests.DIFFERENT, node_tests.TRACEBACK, node_tests.MISTAKE]


def test_operators_are_called_by_their_names(cases: list[Any]) -> None:
    by_name = {case.name: node_tests.operator_of(case) for case in cases}
    assert by_name["test_relu"] == by_name["test_relu_expanded_ver18"] == "Relu"
    assert by_name["test_layer_normalization_4d_axis1_expanded"] == "LayerNormalization"
