"""One process of `fuzz.py`: a number of inputs of one target, within limits of time and memory.

A file beside SCRATCH holds the current input and the count, so that the parent process can tell which input killed this
process. Another file holds the answers so far. With atheris and `--guided`, inputs are chosen by coverage, and inputs
that reach new code are kept in the corpus of the working folder. Otherwise inputs are drawn from a seed.

    python benchmarks/fuzz_worker.py TARGET FOLDER SCRATCH --seed N --inputs N [--guided]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import mmap
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HANG_S = 10  # of processor time for one input
GUIDED = 5  # times as long where every branch is counted
WAIT_S = 120  # of the clock: what waits for ever uses no processor
MEMORY_BYTES = 1_000_000_000  # beyond what the process has before the first input
MAPPED_BYTES = 1 << 21  # count, length, input


class Journal:
    """The number of inputs so far and the current input, in a memory-mapped file."""

    def __init__(self, path: Path) -> None:
        """Map the file at `path`, which is created."""
        path.touch()
        os.truncate(path, MAPPED_BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), MAPPED_BYTES)

    def begin(self, count: int, data: bytes) -> None:
        """Note that input number `count` is now being judged."""
        self._map[8:16] = len(data).to_bytes(8, "little")
        self._map[16 : 16 + len(data)] = data
        self._map[:8] = count.to_bytes(8, "little")

    @property
    def count(self) -> int:
        """Number of inputs so far."""
        return int.from_bytes(self._map[:8], "little")

    @property
    def data(self) -> bytes:
        """Bytes of the current input."""
        return bytes(self._map[16 : 16 + int.from_bytes(self._map[8:16], "little")])


def key_of(error: BaseException) -> str:
    """Return a key for the cause of an error: a digest of its type and of the innermost place in mbc."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}mbc{os.sep}" in f.filename and "benchmarks" not in f.filename]
    place = f"{Path(own[-1].filename).name}:{own[-1].name}:{own[-1].line}" if own else "outside"
    said = str(error)[:14] if type(error).__name__ == "Wrong" else ""
    return hashlib.sha256(f"{type(error).__name__} {place} {said}".encode()).hexdigest()[:12]


def keep_finding(folder: Path, key: str, data: bytes, why: str) -> None:
    """Write the first input of a cause to the findings, with the fault."""
    place = folder / "findings"
    place.mkdir(parents=True, exist_ok=True)
    if not (place / f"{key}.json").exists():
        (place / f"{key}.bin").write_bytes(data)
        (place / f"{key}.json").write_text(json.dumps({"why": why}), encoding="utf-8")


def limit() -> None:
    """Limit the memory of this process, and let signals for too much time kill it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def timed(slower: int) -> Iterator[None]:
    """Kill the process if the body takes too long."""
    signal.setitimer(signal.ITIMER_PROF, HANG_S * slower)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S * slower)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


class Campaign:
    """Judges inputs one after another."""

    def __init__(self, name: str, folder: Path, scratch: Path) -> None:
        """Open the journal of a target; findings go to `folder`."""
        from fuzz_rule import answer
        from fuzz_targets import TARGETS

        self.target, self._answer, self.folder, self.scratch = TARGETS[name], answer, folder, scratch
        folder.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(parents=True, exist_ok=True)
        self._report = scratch.parent / "report.json"
        self.journal = Journal(scratch.parent / "journal")
        self.answers: Counter[str] = Counter()
        self.count = 0
        self.slowest_s = 0.0
        self.slower = 1

    def load(self) -> None:
        """Judge one seed, so that mbc loads its modules before the first input that counts."""
        self._answer(self.target, self.target.seeds()[0], self.scratch)

    def judge(self, data: bytes) -> None:
        """Judge one input."""
        self.count += 1
        self.journal.begin(self.count, data)
        began_s = time.process_time()
        try:
            with timed(self.slower), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.answers[self._answer(self.target, data, self.scratch)] += 1
        except BaseException as error:  # also SystemExit: nothing of mbc may end the process
            self.answers["finding"] += 1
            keep_finding(self.folder, key_of(error), data, "".join(traceback.format_exception(error))[-3000:])
        self.slowest_s = max(self.slowest_s, time.process_time() - began_s)

    def report(self) -> None:
        """Write the answers so far."""
        text = {"answers": dict(self.answers), "slowest_s": round(self.slowest_s, 2)}
        self._report.write_text(json.dumps(text), encoding="utf-8")


def drawn(campaign: Campaign, seed: int, inputs: int) -> None:
    """Judge randomly changed seeds and corpus inputs; one in ten is changed as bytes.

    Each input has its own random seed.
    """
    from fuzz_mutations import change_bytes
    from fuzz_rule import corpus

    draw = random.Random(seed)
    begin = [*campaign.target.seeds(), *corpus(campaign.target)]
    begin += [path.read_bytes() for path in sorted((campaign.folder / "corpus").glob("*"))]
    if seed == 0:  # the first process of a campaign
        for data in begin[:inputs]:
            campaign.judge(data)
    while campaign.count < inputs:
        data = draw.choice(begin)
        for _ in range(draw.choice((1, 1, 2))):
            data = (change_bytes if draw.random() < 0.1 else campaign.target.change)(data, draw)
        campaign.judge(data)


def guided(campaign: Campaign, seed: int, inputs: int) -> None:
    """Judge inputs that atheris (libFuzzer) chooses.

    Inputs that reach new branches of mbc are kept and changed further.
    """
    from fuzz_rule import corpus

    atheris: Any = importlib.import_module("atheris")

    campaign.slower = GUIDED
    kept = campaign.folder / "corpus"
    kept.mkdir(exist_ok=True)
    for data in (*campaign.target.seeds(), *corpus(campaign.target)):
        (kept / hashlib.sha1(data).hexdigest()).write_bytes(data)

    def change(data: bytes, most: int, number: int) -> bytes:
        draw = random.Random(number)
        if draw.random() < 0.4:
            return atheris.Mutate(data, most)
        try:
            return campaign.target.change(data, draw)[:most]
        except MemoryError:
            return data

    def one(data: bytes) -> None:
        campaign.judge(data)
        if campaign.count % 200 == 0 or campaign.count >= inputs:
            campaign.report()  # libFuzzer ends the process its own way

    arguments = [f"-runs={inputs}", f"-seed={seed % 2**31 + 1}", "-max_len=65536", "-timeout=0", "-rss_limit_mb=0"]
    arguments += ["-print_final_stats=0", "-verbosity=0", "-detect_leaks=0", "-report_slow_units=9999"]
    atheris.Setup([sys.argv[0], *arguments, str(kept)], one, custom_mutator=change)
    atheris.Fuzz()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("scratch", type=Path, help="for files that inputs are written to, in memory at best")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--one", type=Path, help="judge this file alone")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    instrumented: Any = contextlib.nullcontext()
    if arguments.guided:
        atheris: Any = importlib.import_module("atheris")
        instrumented = atheris.instrument_imports(include=["mbc"], enable_loader_override=False)
    warnings.simplefilter("ignore")  # zipfile warns of duplicate names
    with instrumented:
        campaign = Campaign(arguments.target, arguments.folder.absolute(), arguments.scratch.absolute())
        campaign.load()
    limit()
    if arguments.one is not None:
        campaign.judge(arguments.one.read_bytes())
    else:
        (guided if arguments.guided else drawn)(campaign, arguments.seed, arguments.inputs)
    campaign.report()


if __name__ == "__main__":
    main()
