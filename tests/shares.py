"""`pytest --shares`: a table of the suites of tests, with the processor seconds of each.

`make test-all SHARES=1` prints it. `make test` takes the time of the suites without the exhaustive tests. The time of
shared objects (a plan, a compiled library) counts for the test that makes them first. tests/README.md lists the purpose
of each suite.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

SUITES = {
    "analysis": "rooflines and traffic of a plan",
    "bench": "other frameworks run the recipe and network of mbc, and are timed alike",
    "benchmarks": "scripts of benchmarks: figures computed from measurements, campaigns at small sizes, hostile inputs"
    " (`fuzz/corpus`), sudden ends",
    "cli": "every command, from arguments to output and exit code",
    "codegen": "generated sources, packages, the build with the real headers",
    "editor": "mistakes, shapes, completions and definitions of sources; the language server, driven as by an editor",
    "equivalence": "each launch and a whole step against float64, within the rounding model",
    "examples": "examples compile, and their plans stay the same, byte by byte",
    "frontend": "parser, messages word for word, the language page, fuzzed sources",
    "gpu": "kernels, libraries and measurements on a GPU (elsewhere skipped)",
    "hardware": "specifications of GPUs, and their links to the host",
    "interchange": "models of PyTorch and ONNX become sources that compute the same; weights and networks there and"
    " back; hostile files",
    "ir": "the graph: its text, ranks and groups of parameters",
    "kernels": "every kernel on the emulator, in each layout and type, against float64",
    "measure": "the measuring worker and its harnesses, on simulated GPUs",
    "ops": "meaning of operations, gradients by finite differences, PyTorch as the reference",
    "optimize": "search: plans fit, give the same bits, and are no faster than their bounds",
    "passes": "passes over networks: gradients, training steps, fusions and shards do not change results",
    "plan": "the plan verifier refuses mutants; plan files; memory",
    "profile": "profiles: read, interpolated, scaled, compared",
    "pytorch": "a loop of PyTorch with mbc compared with the loop without; refusals",
    "ranks": "several processes: start, meeting, agreement, failure, sums by MPI",
    "record": "steps recorded by a fake CUPTI: nodes, launches, files, commands",
    "report": "tables and reports of plans",
    "runtime": "the module: training on the CPU, checkpoints, hostile files",
    "train": "the training loop and its data",
    "tune": "the noise scale of tasks with given noise, reported squared norms, the range test, the table of batches",
    "the whole": "pages and messages; packaging; order of imports",
}


@dataclass
class Share:
    tests: int = 0
    quick_s: float = 0.0
    all_s: float = 0.0


class Shares:
    def __init__(self) -> None:
        self._before_s = 0.0
        self._shares: dict[str, Share] = defaultdict(Share)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._before_s = _cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, pytest.TestReport]:
        """Count the time of each phase of a test. The report carries it from the workers to the process that prints."""
        report: Any = yield
        now_s = _cpu_s()
        report.cpu_s, self._before_s = now_s - self._before_s, now_s
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        _, *folders, _ = report.nodeid.split("::")[0].split("/")
        cpu_s = getattr(report, "cpu_s", 0.0)  # a worker that crashed reports without
        share = self._shares[folders[0] if folders else "the whole"]
        share.tests += report.when == "setup"
        share.all_s += cpu_s
        share.quick_s += 0.0 if "exhaustive" in report.keywords else cpu_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        write("| suite | tests | CPU s, make test | CPU s, make test-all | what it shows |")
        write("| --- | --- | --- | --- | --- |")
        for suite, share in sorted(self._shares.items()):
            write(f"| `{suite}` | {share.tests} | {share.quick_s:.0f} | {share.all_s:.0f} | {SUITES[suite]} |")
        quick_s = sum(share.quick_s for share in self._shares.values())
        all_s = sum(share.all_s for share in self._shares.values())
        tests = sum(share.tests for share in self._shares.values())
        write(f"| sum | {tests} | {quick_s:.0f} | {all_s:.0f} | |")


def _cpu_s() -> float:
    """Return the processor time of this process and of the child processes that it waited for, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shares", action="store_true", help="print the processor seconds of each suite of tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--shares"):
        config.pluginmanager.register(Shares())
