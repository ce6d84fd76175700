"""Mutants of mbc and of its kernels, drawn from a seed: which ones do the tests of `make test` let pass?

Two of three mutants change a line of `mbc/`, one a line of `templates/kernels`: comparisons, `and` and `or`,
arithmetic, `min` and `max`, constants (`mutation_operators.py`). A mutant of mbc meets the tests of its module first,
then those of the mirrored folder and those elsewhere that import it, then those of the command line and of the
language, which run most modules without importing them. A mutant of a kernel is compiled with the sources that include
it, and meets the emulator's cases of their kernels, then the other tests of kernels. The first failure decides, if the
same test passes without the mutant. The outcomes:

    killed            a test failed
    survived          all tests ran and passed, though the line ran
    not reached       no test ran the line
    not compiled      g++ refuses the kernel
    timed out         SECONDS were not enough to decide
    broken test       the test that failed fails without the mutant, too

Each that survived, was not reached or timed out is written with its difference. Needs no GPU and no network.

    python benchmarks/mutation.py [--cases 300] [--workers 16] [--seed COMMIT] [--resume] [--seconds 900]
"""

from __future__ import annotations

import atexit
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutation_operators import KINDS, Site, sites_of
from record import ROOT, start
from sharded import Verdict, asked, campaign, tell

SECONDS = 180.0  # of a mutant
WRONG, NOT_COMPILED, NO_CASE = 1, 3, 5  # how mutation_kernels.py ends, except for 0
PROBE = '__import__("mutant_probe").reached()'
PROBE_SOURCE = """import os
def reached():
    if not os.path.exists(MARK):
        open(MARK, "w").close()
    global reached
    reached = lambda: True
    return True
"""
END_TO_END = ("tests/cli/", "tests/frontend/")  # tests that run most modules
LEFT_OUT = shutil.ignore_patterns(".*", "build", "results", "__pycache__")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (None where time was over) and what it printed."""

    code: int | None
    output: str


@dataclass(frozen=True)
class Copy:
    """A copy of the checkout, in which one mutant at a time is tested."""

    root: Path

    @property
    def mark(self) -> Path:
        """The file that exists once a mutant ran."""
        return self.root / "build" / "reached"

    def run(self, *arguments: str, until: float) -> Ended:
        """Run Python in the copy; all that it started ends with it."""
        given = (p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT)
        paths = os.pathsep.join((str(self.root), str(self.root / "build"), *given))
        kept = os.environ.get("MBC_TEST_OBJECTS", str(ROOT / "build" / "objects"))
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.root, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, **quiet, "PYTHONPATH": paths, "MBC_TEST_OBJECTS": kept},
            )  # fmt: skip
            try:
                code = process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return Ended(code, output.read())

    def pytest(self, *arguments: str, until: float) -> Ended:
        """Run tests in the copy until the first one fails."""
        options = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no")
        return self.run("-m", "pytest", *options, *arguments, until=until)


@cache
def this_copy() -> Copy:
    """Return the copy of this process."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return copied(ROOT, folder / "mbc")


def copied(root: Path, to: Path) -> Copy:
    """Copy a checkout."""
    shutil.copytree(root, to, ignore=LEFT_OUT)
    (to / "build").mkdir(exist_ok=True)
    copy = Copy(to)
    (to / "build" / "mutant_probe.py").write_text(f"MARK = {str(copy.mark)!r}\n{PROBE_SOURCE}", encoding="utf-8")
    return copy


@cache
def pools(root: Path) -> dict[tuple[bool, str], list[tuple[str, Site]]]:
    """Return all sites of the sources by language (whether CUDA) and kind."""
    files = [*sorted((root / "mbc").rglob("*.py")), *sorted((root / "templates" / "kernels").rglob("*.cu*"))]
    result: dict[tuple[bool, str], list[tuple[str, Site]]] = {}
    for file in files:
        for site in sites_of(file):
            place = result.setdefault((file.suffix != ".py", site.kind), [])
            place.append((file.relative_to(root).as_posix(), site))
    return result


def drawn(seed: int, number: int) -> tuple[str, Site]:
    """Return a file and what is to change in it: kinds of changes equally often, and each site of a kind."""
    generator = random.Random(f"{seed} {number}")
    kind = generator.choice(KINDS)
    return generator.choice(pools(ROOT)[number % 3 == 2, kind])


def difference(path: str, source: bytes, site: Site) -> str:
    """Return the mutant as a diff without context."""
    before, after = (text.decode().splitlines() for text in (source, site.applied(source)))
    return "\n".join([*difflib.unified_diff(before, after, path, path, lineterm="", n=0)][1:])


def suites(root: Path, path: str) -> list[list[str]]:
    """Return the files of tests of a module in the order in which they run.

    These are its own, those that import it, those of the command line and the language.
    """
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    mirrored = root / "tests" / Path(path).parent.relative_to("mbc")
    while not mirrored.is_dir():
        mirrored = mirrored.parent
    imports = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    own, importing, end_to_end = list[str](), list[str](), list[str]()
    for file in sorted((root / "tests").rglob("test_*.py")):
        place = file.relative_to(root).as_posix()
        inside = mirrored in file.parents and (mirrored != root / "tests" or file.parent == mirrored)
        if place.startswith("tests/gpu/"):
            continue
        if inside and (name in file.stem or imports.search(file.read_text(encoding="utf-8"))):
            own.append(place)
        elif inside or imports.search(file.read_text(encoding="utf-8")):
            importing.append(place)
        elif place.startswith(END_TO_END):
            end_to_end.append(place)
    return [files for files in (own, importing, end_to_end) if files]


@cache
def passes_alone(copy: Copy, test: str) -> bool:
    """Return whether a test, or the cases of a CUDA file, pass without a mutant."""
    until = time.monotonic() + SECONDS
    if test.startswith("templates/"):
        return on_emulator(copy, test, until).code in (0, NO_CASE)
    return copy.pytest(test, until=until).code == 0


def tested_python(copy: Copy, path: str, until: float) -> tuple[str, str]:
    """Return the outcome of the mutant in the copy, and the test that failed."""
    for files in suites(copy.root, path):
        ended = copy.pytest(*files, until=until)
        if ended.code is None:
            return "timed out", ""
        if ended.code != 0:
            failed = FAILED.search(ended.output)
            return "killed", failed[1] if failed else ""
    return ("survived" if copy.mark.exists() else "not reached"), ""


def including(root: Path, path: str) -> list[str]:
    """Return the names of the CUDA sources that are, or include, a file."""
    files = {file.name: file for file in (root / "templates" / "kernels").rglob("*.cu*")}
    includes = {name: set(re.findall(r'#include "([^"]+)"', file.read_text())) for name, file in files.items()}
    reached = {Path(path).name}
    while more := {name for name, included in includes.items() if included & reached} - reached:
        reached |= more
    return sorted(name for name in reached if name.endswith(".cu"))


def on_emulator(copy: Copy, path: str, until: float) -> Ended:
    """Run the cases of the kernels that are, or include, a CUDA file."""
    script = copy.root / "benchmarks" / "mutation_kernels.py"
    return copy.run(str(script), *including(copy.root, path), until=until)


def tested_kernel(copy: Copy, path: str, until: float) -> tuple[str, str]:
    """Return the outcome of the mutant in the copy, and the test that failed."""
    ended = on_emulator(copy, path, until)
    if ended.code in (None, NOT_COMPILED):
        return "timed out" if ended.code is None else "not compiled", ""
    if ended.code not in (0, NO_CASE):
        return "killed", path
    remaining = copy.pytest("tests/kernels/cuda", "-k", "not test_kernel", until=until)
    if remaining.code == 0:
        return "not reached" if ended.code == NO_CASE else "survived", ""
    failed = FAILED.search(remaining.output)
    return "timed out" if remaining.code is None else "killed", failed[1] if failed else ""


def verdict(copy: Copy, path: str, site: Site) -> Verdict:
    """Test one mutant; the copy is as it was afterwards."""
    file, until = copy.root / path, time.monotonic() + SECONDS
    source = file.read_bytes()
    is_cuda = file.suffix != ".py"
    copy.mark.unlink(missing_ok=True)
    try:
        file.write_bytes(site.applied(source) if is_cuda else site.probed(source, PROBE))
        outcome, test = (tested_kernel if is_cuda else tested_python)(copy, path, until)
    finally:
        file.write_bytes(source)
    if outcome == "killed" and test and not passes_alone(copy, test):
        outcome = "broken test"
    counts = {f"{'cuda' if is_cuda else 'python'} {site.kind} {outcome}": 1}
    report = "" if outcome in ("killed", "not compiled") else f"{outcome} {test}\n{difference(path, source, site)}"
    return Verdict(outcome, report, counts)


def judge(seed: int, number: int) -> Verdict:
    """Judge one mutant."""
    return verdict(this_copy(), *drawn(seed, number))


def last_commit() -> int:
    """Return the hash of the last commit as a number; 0 where there is no repository."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout or "0", 16)


def main() -> None:
    """Run the command line."""
    tell(campaign("mutation", judge, asked(__doc__, 300, last_commit()), chunk=1))


if __name__ == "__main__":
    start(main)
