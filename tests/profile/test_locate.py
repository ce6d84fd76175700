"""The profile that a plan is made with: a named one, the user's own, or a shipped one; and none that does not fit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec, find_spec, spec_of
from mbc.hardware.target import LocalGpu, find_device
from mbc.profile import locate as profile_places
from mbc.profile import paths
from mbc.profile.edit import write_profile
from mbc.profile.locate import find_profile, own_path
from mbc.profile.model import Extent, Profile
from mbc.profile.paths import file_name, user_path
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import signature
from tests.profile.profiles import GPU, IDENTITY, measurement, profile, request

A, B = request(8), request(16)
T4 = find_spec("t4")


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without GPU, without own profiles and without shipped profiles."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(paths, "BUNDLED", tmp_path / "shipped")
    monkeypatch.setattr(profile_places, "local_gpus", lambda: ())
    (tmp_path / "shipped").mkdir()
    user_path(GPU.name).parent.mkdir(parents=True)


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = LocalGpu(GPU.name, IDENTITY.driver, GPU.architecture, GPU.memory_bytes, GPU.memory_bytes)
    monkeypatch.setattr(profile_places, "local_gpus", lambda: (here,))
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: IDENTITY.cudnn)


def find(device: DeviceSpec = GPU, path: Path | None = None, accept_stale: bool = False) -> Profile | None:
    """Find a profile, and assert that there is no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return find_profile(device, None if path is None else str(path), accept_stale)


def times(located: Profile | None, of=A) -> list[float]:
    assert located is not None
    return [c.time_us for c in located.candidates(of)]


def test_a_named_profile_must_be_of_the_gpu(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    write_profile(profile({A: [measurement(1, 1.0)]}), path)
    assert times(find(path=path)) == [1.0]
    with pytest.raises(MbcError, match="was measured on NVIDIA H200, but the plan is for Tesla T4") as caught:
        find(T4, path)
    assert caught.value.code == "MBC076"
    assert "--stale-profile" in caught.value.remedy
    accepted = find(T4, path, accept_stale=True)
    assert accepted is not None and accepted.stale
    assert [c.measured for c in accepted.candidates(A)] == [False]
    assert find(path=path, accept_stale=True) == read_profile(path)


def test_a_part_is_estimated_from_the_whole_until_it_is_measured():
    part = find_device("h200@64")
    assert find(part) is None
    write_profile(profile({A: [measurement(1, 10.0)], B: [measurement(1, 20.0)]}), user_path(GPU.name))
    estimated = find(part)
    assert times(estimated) == [pytest.approx(10.0 * 132 / 64)] and estimated is not None
    assert [c.measured for c in estimated.candidates(A)] == [False] and not estimated.extents
    of_part = replace(IDENTITY, gpu=part.name, multiprocessors=64)
    write_profile(replace(profile({A: [measurement(1, 15.0)]}), identity=of_part), user_path(part.name))
    measured = find(part)
    assert measured is not None and measured.identity.gpu == part.name
    assert times(measured) == [15.0] and times(measured, B) == [pytest.approx(20.0 * 132 / 64)]
    assert [(c.measured,) for request in (A, B) for c in measured.candidates(request)] == [(True,), (False,)]
    assert times(find()) == [10.0]
    with pytest.raises(MbcError, match="was measured on NVIDIA H200@64, but the plan is for NVIDIA H200"):
        find(path=user_path(part.name))


def test_the_users_profile_completes_and_overrules_the_shipped_one():
    assert find() is None
    shipped, own = paths.bundled_path(GPU.name), user_path(GPU.name)
    write_profile(
        profile({A: [measurement(1, 1.0)], B: [measurement(1, 4.0)]}, {A: Extent(9, "", "2027-01-01")}), shipped
    )
    located = find()
    assert times(located) == [1.0] and located is not None and located.source == str(shipped)
    write_profile(profile({A: [measurement(1, 2.0)]}, {A: Extent(9, "", "2026-01-01")}), own)
    located = find()
    assert times(located) == [2.0] and times(located, B) == [4.0]
    shipped.unlink()
    located = find()
    assert times(located, B) == [] and located is not None and located.source == str(own)


def test_a_shipped_profile_of_another_cudnn_is_not_mixed_in():
    write_profile(profile({A: [measurement(1, 1.0)]}), user_path(GPU.name))
    newer = profile({B: [measurement(1, 1.0)]}, identity=replace(IDENTITY, cudnn=92100))
    write_profile(newer, paths.bundled_path(GPU.name))
    assert times(find(), B) == []


def test_times_of_another_cudnn_are_left_out_and_reported(on_the_gpu: None):
    write_profile(profile({A: [measurement(1, 1.0)]}), paths.bundled_path(GPU.name))
    old = profile({A: [measurement(1, 9.0)]}, identity=replace(IDENTITY, cudnn=90500))
    write_profile(old, user_path(GPU.name))
    with pytest.warns(
        RuntimeWarning, match=r"is left out: it was measured with cuDNN 9\.5\.0, but 9\.19\.0 is installed"
    ):
        located = find_profile(GPU)
    assert times(located) == [1.0]
    with pytest.raises(MbcError, match=r"was measured with cuDNN 9\.5\.0, but 9\.19\.0 is installed") as caught:
        find(path=user_path(GPU.name))
    assert caught.value.code == "MBC076"
    assert find(T4) is None


def test_a_patch_of_cudnn_changes_nothing(on_the_gpu: None, monkeypatch: pytest.MonkeyPatch):
    write_profile(profile({A: [measurement(1, 1.0)]}), user_path(GPU.name))
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: 91907)
    assert times(find()) == [1.0]
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: 0)  # none can be loaded
    assert times(find()) == [1.0]


def test_another_driver_is_said(on_the_gpu: None):
    write_profile(profile({A: [measurement(1, 1.0)]}, identity=replace(IDENTITY, driver="570.2")), user_path(GPU.name))
    with pytest.warns(RuntimeWarning, match=r"with driver 570\.2, but this machine has 580\.1"):
        assert times(find_profile(GPU)) == [1.0]


def test_new_measurements_do_not_go_into_a_file_of_another_cudnn(monkeypatch: pytest.MonkeyPatch):
    own = user_path(GPU.name)
    assert own_path(GPU.name) == own
    write_profile(profile({A: [measurement(1, 1.0)]}), own)
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: 91903)
    assert own_path(GPU.name) == own and own.is_file()
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: 92100)
    with pytest.warns(RuntimeWarning, match=r"cuDNN 9\.19\.0.*h200-cudnn9\.19\.0\.sqlite"):
        assert own_path(GPU.name) == own
    assert not own.exists()
    assert signature(A) in read_profile(own.with_name("h200-cudnn9.19.0.sqlite")).measurements


def test_a_described_card_has_no_measured_times_of_the_listed_card_of_its_name() -> None:
    """Its times are scaled to its figures; memory and the PCIe link of a card may differ from the list."""
    listed = find_spec("h200")
    assert listed.sheet is not None
    write_profile(
        profile({A: [measurement(1, 10.0)]}, identity=replace(IDENTITY, gpu=listed.name)),
        paths.bundled_path(listed.name),
    )
    smaller = spec_of(replace(listed.sheet, memory_bytes=listed.memory_bytes // 2, pcie_generation=3))
    for same in (listed, smaller):
        located = find(same)
        assert located is not None
        assert [(c.measured, c.time_us) for c in located.candidates(A)] == [(True, 10.0)]
    for other in (replace(listed.sheet, multiprocessors=16), replace(listed.sheet, bandwidth_gb_s=600.0)):
        located = find(spec_of(other))
        assert located is not None
        assert [c.measured for c in located.candidates(A)] == [False]
        assert all(time > 10.0 for time in times(located))


def test_file_names():
    assert file_name("NVIDIA H200") == "h200.sqlite"
    assert file_name("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb.sqlite"
