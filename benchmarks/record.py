"""Results of benchmarks: figures as JSON with the machine and versions that they come from, and a short table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the checkout's mbc, also where it is not installed
RESULTS = Path(os.environ.get("MBC_RESULTS", ROOT / "benchmarks" / "results"))


def environment() -> dict[str, Any]:
    """Return the machine, versions and digests of the code (for `stale.py`); missing parts are null."""
    from mbc.provenance import digests

    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(Path(sys.argv[0]).name, *sys.argv[1:])]),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "gpu": None,
        "driver": None,
        "cudnn": None,
        "torch": None,
        "code": digests(),
    }
    if shutil.which("nvidia-smi"):
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout
        if "," in answer:
            result["gpu"], result["driver"] = (field.strip() for field in answer.splitlines()[0].split(",")[:2])
    try:
        import torch  # pyright: ignore[reportMissingImports]

        result["torch"] = torch.__version__
        result["cudnn"] = torch.backends.cudnn.version()
    except ImportError:
        pass
    return result


def build_kernels(precision: str) -> None:
    """Compile every kernel of mbc for this GPU into mbc's cache, before several processes need the kernels."""
    from mbc.codegen.build import build_kernel_library
    from mbc.codegen.toolchain import find_toolchain
    from mbc.hardware.target import find_device
    from mbc.ir.types import Precision

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        build_kernel_library(find_device("auto").architecture, Precision(precision), library, find_toolchain())


def attempt(work: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the result of `work`, or its failure, so that one failing item does not end the others."""
    try:
        return {"name": name, **work()}
    except BaseException as error:  # also SystemExit of a library; Ctrl-C is the only one let through
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        return {"name": name, "failed": f"{type(error).__name__}: {error}"}


def need_gpu(instead: str) -> None:
    """End the benchmark with a message if there is no GPU, before anything is built for it."""
    from mbc.hardware.target import local_gpus

    if not local_gpus():
        raise SystemExit(f"this machine has no GPU that can be used: {instead}")


def start(main: Callable[[], None]) -> None:
    """Run a benchmark. An error that a user can correct (no GPU, no profile) ends it with a message."""
    from mbc.errors import MbcError

    # Ends as Ctrl-C does: processes that work for this one would go on without it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except MbcError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        print("interrupted: what was written is kept", file=sys.stderr)
        # An interrupt between taking a lock and entering its block leaves it locked: an exit that waits for other
        # threads might never end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


@dataclass
class Results:
    """Rows of `results/<name>.json` by their names, written after every change.

    A benchmark that was cut off continues with the rows that are missing.

    Attributes:
        name: Name of the file.
        more: What the file says beside the rows and the environment.
        rows: The rows by name, including those that are to be made again.
        outdated: Names of the rows that are to be made again. Each row stays until its new row replaces it.
    """

    name: str
    more: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    outdated: set[str] = field(default_factory=set[str])

    def kept(self, row: str) -> dict[str, Any]:
        """Return a row that is not to be made again, or an empty row."""
        return {} if row in self.outdated else self.rows.get(row, {})

    def done(self, row: str) -> bool:
        """Return whether the row exists, did not fail and is not to be made again."""
        return bool(self.kept(row)) and "failed" not in self.rows[row]

    def put(self, row: dict[str, Any]) -> None:
        """Add or replace a row, and write the file."""
        self.rows[row["name"]] = row
        self.outdated.discard(row["name"])
        write(self.name, list(self.rows.values()), **self.more)

    def arrange(self, names: Sequence[str]) -> None:
        """Write the rows again, these names first, because the order in which rows end is chance."""
        if self.rows:
            first = [name for name in names if name in self.rows]
            self.rows = {name: self.rows[name] for name in dict.fromkeys((*first, *self.rows))}
            write(self.name, list(self.rows.values()), **self.more)


def current_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of `results/<name>.json` if today's code computed them, otherwise none.

    The file of this run's folder takes precedence over that of the checkout.
    """
    from mbc.provenance import digests

    for path in (folder / f"{name}.json" for folder in (RESULTS, ROOT / "benchmarks" / "results")):
        if path.exists() and (held := json.loads(path.read_text(encoding="utf-8"))).get("code") == digests():
            return held["rows"]
    return []


def results(name: str, again: bool = False, current: bool = False, **more: Any) -> Results:
    """Return the earlier rows of `results/<name>.json`.

    The file of this run's folder takes precedence over that of the checkout. Rows of other code get the digests of that
    code and their GPU, because the file will name today's.

    Args:
        name: Name of the file.
        again: Whether rows that the file has are to be made again. Rows that this run does not make stay, unless the
            file has other settings than `more`.
        current: Whether rows of other code, or with other settings than `more`, are left out.
        more: What the file says beside the rows and the environment.
    """
    from mbc.provenance import digests

    settings = {**({"code": digests()} if current else {}), **(more if again or current else {})}
    for folder in (RESULTS, ROOT / "benchmarks" / "results"):
        path = folder / f"{name}.json"
        if path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if any(held.get(k) != v for k, v in settings.items()):
                continue
            today = held.get("code") == digests()
            older = {} if today else {"code": held.get("code"), "gpu": held.get("gpu")}
            rows = {row["name"]: {**older, **row} for row in held["rows"]}
            return Results(name, more, rows, {*rows} if again else set[str]())
    return Results(name, more, {})


def write(name: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Write `results/<name>.json`, whole or not at all."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**environment(), **more, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a table with these columns. Failures stand at the end of their lines."""
    cells = [list(columns)] + [[_text(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line, row in zip(cells, [{}, *rows], strict=True):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(text.rstrip(), f"FAILED {row['failed']}" if "failed" in row else "", flush=True)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-2 or abs(value) >= 1e5 else f"{value:.4g}"
    return str(value)
