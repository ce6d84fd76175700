"""Mutated checkpoints, 320 of the 5,000 of `benchmarks/checkpoint_mutants.py`. Its judge finds faults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from checkpoint_mutants import KINDS, judge, probe, verdict
from sharded import judged


def test_a_module_loads_what_the_library_reads():
    row = judged(judge, 2, range(16 * len(KINDS)))
    assert row["failures"] == []
    valid, loaded = ({kind: row["counts"][f"{kind} {what}"] for kind in KINDS} for what in ("valid", "loaded"))
    assert loaded == valid and row["outcomes"] == {"loaded": sum(valid.values()), "refused": 320 - sum(valid.values())}
    assert valid["reordered"] == valid["halved"] == 16 and valid["cut"] == valid["flip_length"] == 0
    assert 80 < sum(valid.values()) < 200


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("takes all", "loaded, though it should not be"),
        ("takes nothing", "refused: nothing"),
        ("half way", "refused, and yet changed the module"),
        ("aliases", "'conv0.weight' is not what the file holds"),
        ("traceback", "TypeError: a bug"),
    ],
)
def test_the_judge_finds_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, why: str):
    from mbc.errors import MbcError

    net = probe()
    net.save(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    name = "conv0.weight"

    def load(_: Any) -> None:
        if fault in ("half way", "aliases"):
            net.set_state(name, np.zeros(net.states[name]))
        if fault == "traceback":
            raise TypeError("a bug")
        if fault in ("half way", "takes nothing"):
            raise MbcError("MBC163", "nothing")

    monkeypatch.setattr(net, "load", load)
    file = whole[:-1] if fault in ("takes all", "half way") else whole
    assert verdict(net, file, tmp_path / "mutant")[2] == why
