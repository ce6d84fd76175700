"""Runs of the kernels' tests on a GPU: counts are read from what pytest and compute-sanitizer print."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kernel_tests

CLEAN, FOUND = "========= ERROR SUMMARY: 0 errors\n", "========= ERROR SUMMARY: 3 errors\n"


@pytest.mark.parametrize(
    ("tool", "status", "output", "logs", "passes"),
    [
        ("plain", 0, "4060 passed, 412 skipped in 31.70s", [], True),
        ("plain", 1, "FAILED tests/a.py::b\n1 failed, 4471 passed in 31.70s", [], False),
        ("plain", 1, "2 passed, 1 error in 1.00s", [], False),
        ("plain", 3, "4472 passed in 31.70s", [], False),
        ("memcheck", 0, "4472 passed in 101.20s (0:01:41)", [CLEAN, CLEAN], True),
        ("memcheck", 0, "4472 passed in 101.20s (0:01:41)", [CLEAN, FOUND], False),
    ],
)
def test_a_row_passes_if_nothing_failed_and_nothing_was_found(
    tool: str, status: int, output: str, logs: list[str], passes: bool
) -> None:
    figures = kernel_tests.figures(tool, status, output, logs)
    assert figures["passed"] == passes
    assert figures["without_kernel"] == (412 if "skipped" in output else 0)
    assert figures["errors"] == (None if tool == "plain" else 3 * (FOUND in logs))


@pytest.mark.parametrize(
    ("tool", "output", "logs"),
    [
        ("plain", "5 deselected in 1.00s", []),
        ("memcheck", "4472 passed in 9.00s", []),
        ("memcheck", "4472 passed in 9.00s", [CLEAN, "a process that crashed"]),
    ],
)
def test_a_run_without_a_count_is_no_result(tool: str, output: str, logs: list[str]) -> None:
    with pytest.raises(RuntimeError, match="no count"):
        kernel_tests.figures(tool, 0, output, logs)


def test_the_words_of_rows_are_in_the_tests_of_the_kernels() -> None:
    text = kernel_tests.TESTS.read_text(encoding="utf-8")
    assert "def test_kernel_of_a_gpu_that_poses(" in text and "def test_repeated_" in text
    assert all(
        f'"{name.removeprefix("as ")}"' in text for name in kernel_tests.SELECTED if name != kernel_tests.AS_ITSELF
    )
