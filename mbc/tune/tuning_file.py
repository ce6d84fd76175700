"""A file with a tuning's results so far, to resume from."""

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
    """The results of a tuning so far, written to a file as soon as each is available.

    Attributes:
        key: The settings of the tuning, which distinguish its file from those of other tunings.
        path: The file; None for no file.
        probes: Probes by number of GPUs and by batch.
        range_test: The result of the range test.
        noise: The measured noise scale.
    """

    key: Mapping[str, str]
    path: Path | None = None
    probes: dict[int, dict[int, Probe]] = field(default_factory=dict[int, dict[int, Probe]])
    range_test: RangeTest | None = None
    noise: NoiseScale | None = None

    def write(self) -> None:
        """Write the file.

        Raises:
            MbcError: MBC316 if it cannot be written.
        """
        if self.path is None:
            return
        document = {
            "version": VERSION,
            "key": dict(self.key),
            "probes": {
                str(gpus): {str(at): _probe_document(probe) for at, probe in by_batch.items()}
                for gpus, by_batch in self.probes.items()
            },
            "range_test": None if self.range_test is None else asdict(self.range_test),
            "noise": None if self.noise is None else asdict(self.noise),
        }
        try:
            replace_file(self.path, [json.dumps(document, indent=1).encode()])
        except OSError as error:
            raise MbcError(
                "MBC316", f"cannot write '{self.path}': {error.strerror or error}", "choose another --state FILE"
            ) from error


def open_state(path: Path | None, key: Mapping[str, str]) -> State:
    """Return the state in a file, or an empty state if there is no file.

    Raises:
        MbcError: MBC316 if the file is no state, or belongs to a tuning with other settings.
    """
    if path is None or not path.exists():
        return State(key, path)
    remedy = "give another --state FILE, or remove this one"
    try:
        document: Any = json.loads(files.read_text(path, MOST_BYTES))
        if document["version"] != VERSION:
            raise ValueError("version")
        state = State(
            {str(name): str(value) for name, value in document["key"].items()},
            path,
            {
                int(gpus): {int(at): _probe(int(at), probe) for at, probe in by_batch.items()}
                for gpus, by_batch in document["probes"].items()
            },
            None if document["range_test"] is None else _of_lists(RangeTest, document["range_test"]),
            None if document["noise"] is None else _of_lists(NoiseScale, document["noise"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MbcError("MBC316", f"'{path}' is not the state of a tuning", remedy) from error
    differing = [name for name in sorted({*key, *state.key}) if key.get(name) != state.key.get(name)]
    if differing:
        raise MbcError("MBC316", f"'{path}' belongs to a tuning with another {' and '.join(differing)}", remedy)
    return state


def _probe_document(probe: Probe) -> dict[str, Any]:
    if probe.figures is not None:
        return asdict(probe.figures)
    assert probe.refusal is not None
    return {"code": probe.refusal.code, "message": probe.refusal.message, "help": probe.refusal.remedy}


def _probe(at: int, document: Mapping[str, Any]) -> Probe:
    if "code" in document:
        return Probe(at, None, MbcError(document["code"], document["message"], document["help"]))
    return Probe(at, Figures(**document))


def _of_lists(kind: type[Part], document: Mapping[str, Any]) -> Part:
    return kind(**{n: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for n, v in document.items()})
