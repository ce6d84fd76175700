"""What a tuning has found so far, as a file to go on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from mbc import files
from mbc.errors import MbcError
from mbc.fit import Figures, Probe
from mbc.runtime.replace import replace_file
from mbc.tune.measured_noise import NoiseScale
from mbc.tune.range_test import RangeTest

VERSION = 1
MOST_BYTES = 16 << 20
Part = TypeVar("Part")


@dataclass
class State:
    """`key`: what was asked, by which a file is told from that of another tuning. `probes` by GPUs and batch. Each
    finding is written to `path` (None: nowhere) as soon as it is known."""

    key: Mapping[str, str]
    path: Path | None = None
    probes: dict[int, dict[int, Probe]] = field(default_factory=dict[int, dict[int, Probe]])
    range_test: RangeTest | None = None
    noise: NoiseScale | None = None

    def write(self) -> None:
        """MBC316 where it cannot be written."""
        if self.path is None:
            return
        told = {
            "version": VERSION,
            "key": dict(self.key),
            "probes": {
                str(gpus): {str(at): _probe_document(probe) for at, probe in found.items()}
                for gpus, found in self.probes.items()
            },
            "range_test": None if self.range_test is None else asdict(self.range_test),
            "noise": None if self.noise is None else asdict(self.noise),
        }
        try:
            replace_file(self.path, [json.dumps(told, indent=1).encode()])
        except OSError as error:
            raise MbcError(
                "MBC316", f"cannot write '{self.path}': {error.strerror or error}", "choose another --state FILE"
            ) from error


def open_state(path: Path | None, key: Mapping[str, str]) -> State:
    """What lies at `path`, an empty one where nothing does. MBC316 where it is no such file, or of another tuning."""
    if path is None or not path.exists():
        return State(key, path)
    remedy = "give another --state FILE, or remove this one"
    try:
        told: Any = json.loads(files.read_text(path, MOST_BYTES))
        if told["version"] != VERSION:
            raise ValueError("version")
        state = State(
            {str(name): str(value) for name, value in told["key"].items()},
            path,
            {
                int(gpus): {int(at): _probe(int(at), probe) for at, probe in found.items()}
                for gpus, found in told["probes"].items()
            },
            None if told["range_test"] is None else _of_lists(RangeTest, told["range_test"]),
            None if told["noise"] is None else _of_lists(NoiseScale, told["noise"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MbcError("MBC316", f"'{path}' is no state of a tuning", remedy) from error
    differing = [name for name in sorted({*key, *state.key}) if key.get(name) != state.key.get(name)]
    if differing:
        raise MbcError("MBC316", f"'{path}' is of a tuning with another {' and '.join(differing)}", remedy)
    return state


def _probe_document(probe: Probe) -> dict[str, Any]:
    if probe.figures is not None:
        return asdict(probe.figures)
    assert probe.refusal is not None
    return {"code": probe.refusal.code, "message": probe.refusal.message, "help": probe.refusal.remedy}


def _probe(at: int, told: Mapping[str, Any]) -> Probe:
    if "code" in told:
        return Probe(at, None, MbcError(told["code"], told["message"], told["help"]))
    return Probe(at, Figures(**told))


def _of_lists(kind: type[Part], told: Mapping[str, Any]) -> Part:
    return kind(**{n: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for n, v in told.items()})
