"""mbc's own kernels on this GPU, as itself and as older GPUs, compared with float64, and under compute-sanitizer.

Each row is a run of `tests/gpu/test_kernels.py`: one architecture, without a tool or with memcheck. `passed_cases` are
cases of operations, shapes and layouts, `without_kernel` those for which the architecture has no kernel; `errors` are
those that memcheck counts in all processes. A row passes if no case fails and memcheck finds nothing. With memcheck the
volume of 12 GB is left out.

    python benchmarks/kernel_tests.py [--only NAME ...] [--workers 8] [--limit 500] [--again]

Writes `results/kernel_tests.json`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from record import ROOT, attempt, need_gpu, results, show, start

TESTS = ROOT / "tests" / "gpu" / "test_kernels.py"
AS_ITSELF = "the GPU itself"
SELECTED = {
    AS_ITSELF: "not poses and not repeated",
    **{f"as {pose}": f"poses and {pose}" for pose in ("sm_75", "sm_80", "sm_86", "sm_89")},
}
PLAIN, MEMCHECK = "plain", "memcheck"
ROWS = {f"{name}, {tool}": (name, tool) for tool in (PLAIN, MEMCHECK) for name in SELECTED}
COLUMNS = ("name", "passed_cases", "failed_cases", "without_kernel", "errors", "seconds", "passed")


def command(name: str, tool: str, workers: int, log: Path) -> list[str]:
    """Return the command of a row: pytest, under compute-sanitizer if the row asks for it."""
    sanitizer = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--log-file", f"{log}.%p"]
    expression = SELECTED[name] if tool == MEMCHECK else SELECTED[name].replace(" and not repeated", "")
    pytest = [sys.executable, "-m", "pytest", "-n", str(workers), "-k", expression, str(TESTS)]
    return [*(sanitizer if tool == MEMCHECK else []), *pytest]


def figures(tool: str, status: int, output: str, logs: list[str]) -> dict[str, Any]:
    """Return the figures of a run.

    Args:
        tool: `plain` or `memcheck`.
        status: Exit status of the command.
        output: What pytest printed.
        logs: What compute-sanitizer wrote, for each process.

    Raises:
        RuntimeError: pytest or compute-sanitizer did not end with a count.
    """
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", output)}
    sums = [int(number) for log in logs for number in re.findall(r"ERROR SUMMARY: (\d+) error", log)]
    if not counts.get("passed") or (tool == MEMCHECK and (not sums or len(sums) < len(logs))):
        raise RuntimeError(f"no count: {output.strip()[-300:]}")
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    errors = sum(sums) if tool == MEMCHECK else None
    seconds = re.search(r" in ([\d.]+)s", output)
    return {
        "passed_cases": counts["passed"], "failed_cases": failed, "without_kernel": counts.get("skipped", 0),
        "errors": errors, "seconds": float(seconds[1]) if seconds else None,
        "failures": re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)[:20],
        "passed": not status and not failed and not errors,
    }  # fmt: skip


def run_row(name: str, tool: str, workers: int, limit_s: float) -> dict[str, Any]:
    """Run the tests of a row and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        environment = os.environ | {"MBC_MEMCHECK": "1"} if tool == MEMCHECK else None
        done = subprocess.run(
            command(name, tool, workers, log), cwd=ROOT, env=environment, text=True, capture_output=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
        logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(Path(folder).iterdir())]
        findings = [line for text in logs for line in text.splitlines() if "Invalid" in line or " at " in line]
        print(done.stdout[-2000:], *findings[:20], sep="\n", file=sys.stderr)
        return figures(tool, done.returncode, done.stdout, logs)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="rows whose names contain a word")
    parser.add_argument("--workers", type=int, default=8, help="processes of pytest")
    parser.add_argument("--limit", type=float, default=500.0, metavar="SECONDS", help="time limit of a row")
    parser.add_argument("--again", action="store_true", help="also rows that have results")
    arguments = parser.parse_args()
    need_gpu("the tests run kernels")
    names = [name for name in ROWS if not arguments.only or any(word in name for word in arguments.only)]
    if shutil.which("compute-sanitizer") is None and any(ROWS[name][1] == MEMCHECK for name in names):
        raise SystemExit("there is no compute-sanitizer: it comes with the CUDA toolkit (--only plain runs without it)")
    kept = results("kernel_tests", arguments.again)
    for name in names:
        if not kept.done(name):
            kept.put(attempt(partial(run_row, *ROWS[name], arguments.workers, arguments.limit), name))
            kept.arrange(list(ROWS))
    show(list(kept.rows.values()), COLUMNS)


if __name__ == "__main__":
    start(main)
