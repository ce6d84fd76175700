"""Runs of compute-sanitizer over one step and one forward pass of every case of `sanitized_step.py`.

memcheck and initcheck examine digits, ResNet-18, U-Net, MobileNet-V2, and plans with offloading, fused recomputation
and a concurrent stream, in fp32 and bf16. racecheck and synccheck examine steps that consist of mbc's own kernels.
memcheck and racecheck also examine such steps on a GPU that poses as sm_75, sm_80, sm_86 and sm_89.

Several cases are examined side by side, because nothing is timed. A clean case is not repeated until the code changes.
A call continues where the call before stopped. Each case takes at most `--limit` seconds, after which it counts as not
clean. The exit status is 0 if all are clean.

    python benchmarks/sanitizer.py [--for 540] [--limit 280] [--workers 4] [--only WORD ...]
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from record import RESULTS, ROOT, need_gpu, start
from sanitized_step import CASES, PRECISIONS

from mbc.provenance import digests

SCRIPT = Path(__file__).resolve().with_name("sanitized_step.py")
FILE = "sanitizer.txt"
LOOKS = tuple((name, p, tool) for name, case in CASES.items() for p in PRECISIONS for tool in case.tools)
Look = tuple[str, str, str]


class Said:
    """The file `sanitizer.txt`: the digests of the code, the date, the GPU, and one line for each examination."""

    def __init__(self) -> None:
        """Read the lines that today's code made."""
        self.lines: dict[Look, str] = {}
        self._turn = Lock()
        for path in (RESULTS / FILE, ROOT / "benchmarks" / "results" / FILE):
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            if dict(re.findall(r"^code ([\w/]+) ([0-9a-f]+)$", text, re.M)) == digests():
                result = re.findall(r"^((\w+) (\w+) (\w+): exit .*)$", text, re.M)
                self.lines = {(name, precision, tool): line for line, name, precision, tool in result}
                break

    def clean(self, look: Look) -> bool:
        """Return whether a case was examined and is clean."""
        return ": exit 0," in self.lines.get(look, "")

    def put(self, look: Look, text: str) -> None:
        """Add a line, and write the file."""
        with self._turn:
            self.lines[look] = f"{' '.join(look)}: {text}"
            print(self.lines[look], flush=True)
            query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
            gpu = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[:1] if _has_gpu() else []
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            code = [f"code {part} {digest}" for part, digest in digests().items()]
            kept = [self.lines[one] for one in LOOKS if one in self.lines]
            RESULTS.mkdir(parents=True, exist_ok=True)
            part = RESULTS / f"{FILE}.part"
            part.write_text("\n".join([*code, date, *gpu, *kept]) + "\n", encoding="utf-8")
            part.replace(RESULTS / FILE)


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def build(name: str, precision: str, folder: Path, limit_s: float) -> str:
    """Return an empty text, or why the package was not built."""
    command = [sys.executable, str(SCRIPT), "build", name, precision, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "exit 124, not built in time"
    return (
        "" if done.returncode == 0 else f"exit {done.returncode}, not built: {(done.stderr.splitlines() or ['?'])[-1]}"
    )


def look_at(folder: Path, tool: str, limit_s: float) -> str:
    """Print the tool's findings. Return its exit status and its summary."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, str(SCRIPT), "run", str(folder)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s)
        code, out = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, out = 124, late.stdout or b""
    text = out.decode(errors="replace")
    summaries = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
    if code:
        lines = text.splitlines()
        said = [line for line in lines if "=====" in line][:40]
        print("\n".join([*said, *[line for line in lines if "=====" not in line][-5:]]), flush=True)
    return f"exit {code}, {summaries[-1] if summaries else 'no summary'}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="for_s", type=float, default=540.0, metavar="S", help="begin no more then")
    parser.add_argument("--limit", type=float, default=280.0, metavar="S", help="of one look, and of one build")
    parser.add_argument("--workers", type=int, default=4, help="packages at a time")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="looks whose line holds one of these")
    parser.add_argument("--list", action="store_true", help="say what is missing, and run nothing")
    arguments = parser.parse_args()
    until_s = time.monotonic() + arguments.for_s
    said = Said()
    wanted = [look for look in LOOKS if not arguments.only or any(word in " ".join(look) for word in arguments.only)]
    missing = [look for look in wanted if not said.clean(look)]
    if arguments.list:
        print("\n".join(" ".join(look) for look in missing))
        return
    need_gpu("it looks at kernels")
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("there is no compute-sanitizer: it comes with the CUDA toolkit")

    def package(name: str, precision: str) -> None:
        tools = [look for look in missing if look[:2] == (name, precision)]
        with tempfile.TemporaryDirectory(prefix="mbc-sanitizer-") as folder:
            if time.monotonic() > until_s:
                return
            failed = build(name, precision, Path(folder) / name, arguments.limit)
            for look in tools:
                left_s = until_s - time.monotonic()
                if failed:
                    said.put(look, failed)
                elif left_s > 0:
                    said.put(look, look_at(Path(folder) / name, look[2], min(arguments.limit, left_s + 60)))

    with ThreadPoolExecutor(arguments.workers) as pool:
        list(pool.map(lambda pair: package(*pair), dict.fromkeys(look[:2] for look in missing)))
    left = [" ".join(look) for look in wanted if not said.clean(look)]
    if left:
        raise SystemExit(f"not clean, or not looked at: {', '.join(left)}")
    print("all are clean")


if __name__ == "__main__":
    start(main)
