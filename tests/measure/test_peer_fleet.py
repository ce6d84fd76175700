"""Measuring copies between two GPUs in one process that sees both: its answer, refusal or death."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.hardware.transfers import PeerLink
from mbc.measure import collective_fleet
from mbc.measure.peer_fleet import measure_peer_link
from mbc.profile.model import calibrated
from mbc.profile.read_profile import read_profile
from tests.measure.test_collective_fleet import HERE


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setattr(collective_fleet, "local_gpus", lambda: (HERE, HERE, HERE))


def measured(path: Path, *behaviour: str) -> PeerLink:
    worker = (sys.executable, "-m", "tests.measure.fake_peer_worker", *behaviour)
    return measure_peer_link(("0", "1", "2"), path, worker=worker, build=lambda *asked: None)


def test_the_link_is_in_the_profile_and_used(tmp_path: Path) -> None:
    path = tmp_path / "here.sqlite"
    link = measured(path)
    assert link.to_peer_gb_s == 390.0
    spec = calibrated(find_spec("h200"), read_profile(path))
    assert spec.peer_link == link and spec.host_link.to_host_gb_s == 48.0


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [("refuses", "MBC105", "no peer access"), ("dies", "MBC275", "died (exit status 7)")],
)
def test_a_process_that_fails(tmp_path: Path, behaviour: str, code: str, words: str) -> None:
    with pytest.raises(MbcError) as caught:
        measured(tmp_path / "here.sqlite", behaviour)
    assert caught.value.code == code and words in caught.value.message


def test_without_a_way_between_them_the_link_to_the_host_is_known(tmp_path: Path) -> None:
    path = tmp_path / "here.sqlite"
    with pytest.raises(MbcError):
        measured(path, "refuses")
    spec = calibrated(find_spec("h200"), read_profile(path))
    assert spec.host_link.to_host_gb_s == 48.0 and not spec.peer_link.measured
