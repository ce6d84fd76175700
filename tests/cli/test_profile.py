"""`mbc profile`: measuring, by processes that only pretend to measure, and handling of profiles."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveKind, CollectiveSlowdown, CollectiveTime, ConcurrentKernel, Link
from mbc.hardware.host_sharing import SharedRates, sharing_constants
from mbc.hardware.spec import find_spec
from mbc.hardware.target import LocalGpu
from mbc.hardware.transfers import link_constants
from mbc.measure import collective_fleet, fleet, host_fleet, peer_fleet
from mbc.measure.collective_fleet import Measured
from mbc.measure.collective_timing import MAX_CTAS
from mbc.measure.fleet import Outcome, Progress
from mbc.measure.measure import Summary
from mbc.measure.need import MOST_WORKSPACE_BYTES
from mbc.profile import locate as profile_places
from mbc.profile import paths
from mbc.profile.edit import write_profile
from mbc.profile.model import Extent, Overhead, collective_subject
from mbc.profile.paths import user_path
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import read_signature, rows_of, signature
from mbc.profile.writer import ProfileWriter
from tests.profile.profiles import GPU, IDENTITY, measurement, profile, request

HERE = LocalGpu(GPU.name, "580.1", GPU.architecture, GPU.memory_bytes, GPU.memory_bytes)
FAKE = (sys.executable, "-m", "tests.measure.fake_worker")


def _no_collectives(gpus, path, tell):
    raise MbcError("MBC270", "several GPUs need NCCL, which does not load")


def _no_copies(gpus, path, tell):
    raise MbcError("MBC105", "no GPU reaches another one")


@pytest.fixture
def gpus(mbc, monkeypatch):
    """A machine with two H200, whose measuring processes report without measuring."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(fleet, "local_gpus", lambda: (HERE, HERE))
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: IDENTITY.cudnn)
    monkeypatch.setattr(collective_fleet, "measure_collectives", _no_collectives)
    monkeypatch.setattr(peer_fleet, "measure_peer_link", _no_copies)
    monkeypatch.setattr(host_fleet, "measure_host_sharing", _no_copies)
    monkeypatch.setattr(collective_fleet, "link_of", lambda gpus: Link.NVLINK)
    original = fleet.measure_on
    monkeypatch.setattr(fleet, "measure_on", lambda gpus, task, progress: original(gpus, task, progress, FAKE))


@pytest.fixture
def tasks(gpus, monkeypatch):
    """Record the measurements that a command asks for, without measuring."""
    asked = []

    def measure_on(gpus, task, progress):
        asked.append((gpus, task))
        return Outcome(None, 0, False)

    monkeypatch.setattr(fleet, "measure_on", measure_on)
    return asked


def rows(path):
    return {rows_of(read_signature(key)) for key in read_profile(path).extents if '"kind":"convolution"' in key}


def test_measuring_into_ones_own_profile(mbc, gpus):
    done = mbc("profile", "tiny.mbc")
    assert done.code == 0
    own = user_path(GPU.name)
    assert done.out.startswith(f"{own}: ") and "operations and sizes measured in " in done.out
    assert rows(own) >= {8, 4, 2}
    again = mbc("profile", "run", "tiny.mbc", "--json")
    figures = again.json
    assert figures["measured"] == 0 and figures["left"] == 0 and figures["known"] == len(read_profile(own).extents)
    assert figures["profile"] == str(own) and figures["gpus"] == ["0"]


def test_all_gpus_several_precisions_and_a_file(mbc, gpus):
    arguments = ("tiny.mbc", "--gpu", "all", "--precision", "bf16,fp32", "--set", "batch=4", "--policy", "undivided")
    done = mbc("profile", *arguments, "-o", "here.sqlite")
    assert done.code == 0
    requests = [read_signature(key) for key in read_profile(Path("here.sqlite")).extents]
    assert {str(r.precision) for r in requests} == {"bf16", "fp32"}
    assert rows(Path("here.sqlite")) == {4}
    assert "on 0" in done.err or "on 1" in done.err  # how the pretending processes sign
    assert "collectives were not measured: several GPUs need NCCL, which does not load" in done.err


def test_on_a_part_of_a_gpu(mbc, tasks):
    """Measurements of a part or a pose of a GPU go into a profile of its own, and use none of the GPU's profile."""
    assert mbc("profile", "tiny.mbc", "--gpu", "1@64").code == 0
    ((gpus, task),) = tasks
    assert gpus == ("1",) and task.multiprocessors == 64 and task.path == user_path(f"{GPU.name}@64")
    assert mbc("profile", "tiny.mbc", "--gpu", "1@64@sm_80").code == 0
    task = tasks[1][1]
    assert (task.multiprocessors, task.pose, task.path) == (64, "sm_80", user_path(f"{GPU.name}@64@sm_80"))
    refused = mbc("profile", "tiny.mbc", "--gpu", "1@65")
    assert refused.code == 1 and "MBC286" in refused.err and "choose 64 or 72" in refused.err


@pytest.fixture
def collectives(tasks, monkeypatch):
    """Record the requests to measure collectives and copies, and write fixed results into the profile."""
    asked, ctas, copies = [], list(MAX_CTAS), []

    def measure_collectives(gpus, path, tell):
        asked.append((gpus, path))
        tell("8 thread blocks: connected")
        times = tuple(CollectiveTime(CollectiveKind.ALL_REDUCE, 2, Link.NVLINK, n, 4, 9.0, 10.0) for n in ctas)
        slowdowns = (CollectiveSlowdown(ConcurrentKernel.GEMM, 2, Link.NVLINK, 8, 1.25, 1.5),)
        with ProfileWriter(path, IDENTITY) as writer:
            writer.record_collectives(times, slowdowns)
        return Measured(times, slowdowns, (Overhead("collectives", collective_subject(2, 8), 1 << 20),))

    def measure_peer_link(gpus, path, tell):
        copies.append("peer")
        link = find_spec("h200").peer_link
        return recorded(path, link_constants(link), link)

    def measure_host_sharing(gpus, path, tell):
        copies.append("host")
        rates = tuple(SharedRates(n, 50.0, 50.0, 40.0 / n, 40.0 / n) for n in (1, 2))
        return recorded(path, sharing_constants(rates), rates)

    def recorded(path, constants, results):
        with ProfileWriter(path, IDENTITY) as writer:
            for name, value in constants.items():
                writer.record_constant(name, value)
        return results

    monkeypatch.setattr(collective_fleet, "measure_collectives", measure_collectives)
    monkeypatch.setattr(peer_fleet, "measure_peer_link", measure_peer_link)
    monkeypatch.setattr(host_fleet, "measure_host_sharing", measure_host_sharing)
    return SimpleNamespace(asked=asked, ctas=ctas, copies=copies)


def test_collectives_alone(mbc, tasks, collectives):
    own = user_path(GPU.name)
    done = mbc("profile", "--gpu", "all")
    assert done.code == 0 and not tasks and collectives.asked == [(("0", "1"), own)]
    assert done.out.startswith(f"{own}: 7 times of collectives between 2 GPUs and 1 slow-downs measured in ")
    assert "8 thread blocks: connected" in done.err
    assert f"{own}: copies between two GPUs measured in " in done.out
    assert f"{own}: copies of 1 to 2 GPUs with the host measured in " in done.out
    assert read_profile(own).constants["to_host_both_gb_s_of_2_gpus"] == 20.0
    figures = mbc("profile", "--gpu", "all", "-o", "here.sqlite", "--json").json
    assert figures["profile"] == "here.sqlite" and figures["gpus"] == ["0", "1"]
    assert figures["times"][0]["time_us"] == 9.0 and figures["slowdowns"][0]["kernel"] == "gemm"
    assert figures["overheads"][0]["size_bytes"] == 1 << 20
    assert figures["host_sharing"][1]["to_device_both_gb_s"] == 20.0 and figures["peer_link"]["latency_us"]
    text = mbc("profile", "list", "here.sqlite").out
    assert "collectives: 7 times, 1 slow-downs (2 ranks over nvlink)" in text


def test_unmeasured_collectives_come_after_kernels(mbc, tasks, collectives):
    for arguments, count in (((), 1), ((), 1), (("--again",), 2)):
        assert mbc("profile", "tiny.mbc", "--gpu", "all", *arguments).code == 0
        assert len(collectives.asked) == count
    assert mbc("profile", "tiny.mbc", "--gpu", "1", "--again").code == 0
    assert len(tasks) == 4 and len(collectives.asked) == 2


def test_each_part_is_measured_where_it_alone_is_unknown(mbc, tasks, collectives, monkeypatch):
    monkeypatch.setattr(collective_fleet, "measure_collectives", _no_collectives)
    done = mbc("profile", "--gpu", "all")
    assert done.code == 0 and "note: collectives were not measured: several GPUs need NCCL" in done.err
    assert collectives.copies == ["peer", "host"] and "copies between two GPUs measured" in done.out
    assert mbc("profile", "tiny.mbc", "--gpu", "all").code == 0
    assert collectives.copies == ["peer", "host"], "both are known"
    with ProfileWriter(user_path(GPU.name), IDENTITY) as writer:
        writer._connection.execute("DELETE FROM constant WHERE name = 'to_host_gb_s_of_2_gpus'")
    assert mbc("profile", "tiny.mbc", "--gpu", "all").code == 0
    assert collectives.copies == ["peer", "host", "host"]


def test_collectives_that_were_broken_off_are_measured_again(mbc, tasks, collectives):
    del collectives.ctas[3:]
    assert mbc("profile", "--gpu", "all").code == 0
    assert mbc("profile", "tiny.mbc", "--gpu", "all").code == 0
    assert len(collectives.asked) == 2


def test_nothing_to_measure(mbc, tasks, collectives, monkeypatch, capsys):
    for arguments in (("--gpu", "1"), ("run",)):
        with pytest.raises(SystemExit, match="2"):
            mbc("profile", *arguments)
        assert "error: networks are missing: NET\nhelp: name some, or measure coll" in capsys.readouterr().err
    monkeypatch.setattr(fleet, "local_gpus", lambda: ())
    done = mbc("profile", "--gpu", "all")
    assert done.code == 1 and "error MBC077: measuring needs a GPU, but none can be used on this machine" in done.err
    assert not collectives.asked


def test_collectives_of_one_gpu(mbc, gpus, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(fleet, "local_gpus", lambda: (HERE,))
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: IDENTITY.cudnn)
    done = mbc("profile", "--gpu", "all")
    assert done.code == 1
    assert "error MBC274: collectives need two GPUs or more, but this machine has 1 that can be used" in done.err


def test_options_reach_the_processes(mbc, tasks):
    assert mbc("profile", "tiny.mbc").code == 0
    ((asked, task),) = tasks
    assert asked == ("0",) and task.path == user_path(GPU.name) and not task.again
    assert task.workspace_limit_bytes == MOST_WORKSPACE_BYTES and task.measure_for_s == math.inf
    limits = ("--gpu", "1", "--workspace-limit", "64MiB", "--measure-for", "5min", "--again", "-o", "x.sqlite")
    assert mbc("profile", *limits, "tiny.mbc").code == 0
    asked, task = tasks[-1]
    assert asked == ("1",) and task.path == Path("x.sqlite") and task.again
    assert task.workspace_limit_bytes == 64 << 20 and task.measure_for_s == 300.0


def test_an_operation_of_several_networks_is_asked_once(mbc, tasks):
    shutil.copy("tiny.mbc", "twin.mbc")
    mbc("profile", "tiny.mbc")
    mbc("profile", "tiny.mbc", "twin.mbc")
    (_, one), (_, two) = tasks
    weights = {need.undivided: need.weight_us for need in one.needs}
    assert {need.undivided: need.weight_us for need in two.needs} == {r: 2 * w for r, w in weights.items()}


def test_an_interrupt_is_exit_code_130(mbc, tasks, monkeypatch):
    def measure_on(gpus, task, progress):
        progress(Progress(1, 9, task.needs[0].undivided, 60.0))
        return Outcome(Summary(measured=1, interrupted=True), 8, True)

    monkeypatch.setattr(fleet, "measure_on", measure_on)
    monkeypatch.setattr("mbc.progress._PLAIN_S", 0.0)
    done = mbc("profile", "tiny.mbc")
    assert done.code == 130
    assert " 1/9  1 min 0 s left  " in done.err
    assert "measuring was interrupted: 8 operations are not measured" in done.err
    assert "the same command again goes on from here" in done.err
    assert "8 are left" in done.out


def test_time_over_is_no_failure(mbc, tasks, monkeypatch):
    monkeypatch.setattr(fleet, "measure_on", lambda *_: Outcome(Summary(measured=1, left=8), 8, False))
    done = mbc("profile", "tiny.mbc", "--measure-for", "1s")
    assert done.code == 0 and "the time for measuring is over: 8 operations" in done.err


def test_no_gpu(mbc, monkeypatch):
    monkeypatch.setattr(fleet, "local_gpus", lambda: ())
    done = mbc("profile", "tiny.mbc")
    assert done.code == 1 and done.err.startswith(
        "error MBC077: measuring needs a GPU, but none can be used on this machine\nhelp: "
    )


def test_bad_input_is_reported_before_anything_starts(mbc, tasks):
    double = mbc("profile", "tiny.mbc", "--set", "train.precision=fp64")
    assert double.code == 1 and "error MBC192: 'tiny.mbc' is in fp64" in double.err
    assert mbc("profile", "tiny.mbc", "--set", "train.precision=fp64", "--precision", "fp32").code == 0
    assert "MBC190" in mbc("profile", "tiny.mbc", "--gpu", "5").err
    assert "MBC183" in mbc("profile", "none.mbc").err
    assert "MBC021" in mbc("profile", "tiny.mbc", "--set", "depth=3").err
    assert mbc("compile", "tiny.mbc", "--gpu", "h200", "-o", "package").code == 0
    assert "error MBC188: 'package' is planned already" in mbc("profile", "package").err
    assert len(tasks) == 1


@pytest.fixture
def two(mbc):
    """Two profiles of one machine, as file names."""
    once = replace(measurement(2, 99.0), dominated=True)
    refused = [replace(measurement(n, 0.0), refused=f"its result is {n}.00e-02 off, 5e-06 is allowed") for n in (7, 8)]
    first = profile(
        {request(8): [measurement(1, 10.0), once, *refused]}, {request(8): Extent(1 << 30, "nhwc engines; x")}
    )
    second = profile({request(8): [measurement(1, 12.0)], request(4): [measurement(1, 6.0)]})
    for name, one in (("a.sqlite", first), ("b.sqlite", second)):
        write_profile(replace(one, constants={"graph_gap_us": 1.25}), Path(name))
    return "a.sqlite", "b.sqlite"


def test_list(mbc, two):
    text = mbc("profile", "list", "a.sqlite").out
    assert text.startswith("a.sqlite (")
    assert "NVIDIA H200 (132 multiprocessors) with cuDNN 9.19.0, sm_90, driver 580.1, begun 2026-11-21" in text
    assert "graph_gap_us 1.25" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("convolution")]
    assert row == ["convolution", "fp32", "1", "2", "1", "2"]
    assert "its result is # off, # is allowed      2" in text
    assert "nhwc engines" in text
    (figures,) = mbc("profile", "list", "a.sqlite", "--json").json
    assert figures["refusals"] == [["its result is # off, # is allowed", 2]]
    assert figures["identity"]["gpu"] == GPU.name and figures["size_bytes"] == Path("a.sqlite").stat().st_size


def test_list_without_a_file(mbc, two, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUNDLED", tmp_path / "shipped")
    assert "no profile is here" in mbc("profile", "list").out
    user_path(GPU.name).parent.mkdir(parents=True)
    shutil.copy("a.sqlite", user_path(GPU.name))
    (tmp_path / "shipped").mkdir()
    write_profile(read_profile(Path("b.sqlite")), tmp_path / "shipped" / "other.sqlite.gz")
    assert [f["source"] for f in mbc("profile", "list", "--json").json] == [
        str(user_path(GPU.name)),
        str(tmp_path / "shipped" / "other.sqlite.gz"),
    ]


def test_diff(mbc, two):
    text = mbc("profile", "diff", *two).out
    assert "both of NVIDIA H200" in text
    assert "median 1.200" in text and "1 differ by more than 5%" in text
    assert "cudnn engine=1 knob2=1" in text and "1.200" in text.splitlines()[-1]
    figures = mbc("profile", "diff", *two, "--json").json
    assert figures["ratios"]["count"] == 1 and figures["changes"][0]["ratio"] == 1.2
    assert figures["only_after"] == [signature(request(4))] and figures["only_before_candidates"] == 3
    assert (
        "no times in common" in mbc("profile", "diff", "a.sqlite", "c.sqlite").out
        if Path("c.sqlite").exists()
        else True
    )


def test_merge(mbc, two):
    done = mbc("profile", "merge", *two, "-o", "both.sqlite")
    assert done.code == 0 and done.out.startswith("both.sqlite: 5 kernels for 2 operations and sizes of NVIDIA H200")
    assert set(read_profile(Path("both.sqlite")).measurements) == {signature(request(8)), signature(request(4))}
    refused = mbc("profile", "merge", *two, "-o", "both.sqlite")
    assert refused.code == 1 and "error MBC193: 'both.sqlite' exists, and is none of" in refused.err
    figures = mbc("profile", "merge", *two, "-o", "a.sqlite", "--json").json
    assert figures == {
        "profile": "a.sqlite", "requests": 2, "candidates": 5, "to_measure_again": 0,
        "size_bytes": Path("a.sqlite").stat().st_size,
    }  # fmt: skip


def test_unlike_profiles_are_not_merged(mbc, two):
    write_profile(profile({}, identity=replace(IDENTITY, cudnn=92100)), Path("new.sqlite"))
    done = mbc("profile", "merge", "a.sqlite", "new.sqlite", "-o", "both.sqlite")
    assert done.code == 1 and "error MBC076" in done.err and not Path("both.sqlite").exists()
    assert "another machine" in mbc("profile", "diff", "a.sqlite", "new.sqlite").out


def test_ship(mbc, two):
    done = mbc("profile", "ship", "a.sqlite", "-o", "small.sqlite")
    assert done.code == 0 and "1 kernels for 1 operations and sizes" in done.out
    (measurements,) = read_profile(Path("small.sqlite")).measurements.values()
    assert [m.time_us for m in measurements] == [10.0]


def test_a_profile_moves_to_another_machine(mbc, two, monkeypatch):
    """A machine imports what another exports. Its own times stay, and the newer time of a kernel counts."""
    missing = mbc("profile", "export", "card.sqlite.gz", "--gpu", "h200")
    assert missing.code == 1 and "error MBC072" in missing.err and str(user_path(GPU.name)) in missing.err
    assert "no kernel was measured here on an NVIDIA H200\nhelp: measure some with `mbc profile NET`" in missing.err
    user_path(GPU.name).parent.mkdir(parents=True)
    shutil.copy("a.sqlite", user_path(GPU.name))
    assert mbc("profile", "export", "card.sqlite.gz", "--gpu", "h200").code == 0
    assert read_profile(Path("card.sqlite.gz")).identity == IDENTITY
    monkeypatch.setenv("XDG_DATA_HOME", str(Path("elsewhere").absolute()))
    for file, requests in (("card.sqlite.gz", 1), ("b.sqlite", 2)):
        document = mbc("profile", "import", file, "--json").json
        assert (document["profile"], document["requests"]) == (str(user_path(GPU.name)), requests)
    both = read_profile(user_path(GPU.name))
    for one in map(read_profile, map(Path, two)):
        assert {*one.measurements} <= {*both.measurements}
    before = user_path(GPU.name).read_bytes()
    write_profile(profile({}, identity=replace(IDENTITY, cudnn=92100)), Path("new.sqlite"))
    done = mbc("profile", "import", "new.sqlite")
    assert done.code == 1 and "error MBC076" in done.err and user_path(GPU.name).read_bytes() == before


@pytest.mark.parametrize("command", ["list", "diff", "merge", "ship", "import"])
def test_what_is_no_profile(mbc, two, command):
    Path("damaged.sqlite").write_bytes(b"?" * 5000)
    more = {"diff": ("a.sqlite",), "merge": ("a.sqlite", "-o", "c.sqlite"), "ship": ("-o", "c.sqlite")}.get(command, ())
    done = mbc("profile", command, "damaged.sqlite", *more)
    assert done.code == 1 and "error MBC073: 'damaged.sqlite' is not a profile" in done.err


def test_planning_with_a_profile_of_another_gpu(mbc, two):
    refused = mbc("show", "tiny.mbc", "--gpu", "t4", "--profile", "a.sqlite")
    assert refused.code == 1 and "error MBC076: the profile 'a.sqlite' was measured on NVIDIA H200" in refused.err
    assert mbc("show", "tiny.mbc", "--gpu", "t4", "--profile", "a.sqlite", "--stale-profile").code == 0


def test_notes_of_planning_are_said_once(mbc, two, monkeypatch):
    user_path(GPU.name).parent.mkdir(parents=True)
    shutil.copy("a.sqlite", user_path(GPU.name))
    monkeypatch.setattr(profile_places, "local_gpus", lambda: (replace(HERE, driver="999.9"),))
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: IDENTITY.cudnn)
    done = mbc("show", "tiny.mbc", "--gpu", "h200", "--json")
    assert done.code == 0 and json.loads(done.out)
    assert done.err.count("note: the profile '") == 2  # one's own and the shipped one
    assert "measured with driver 580.1, but this machine has 999.9" in done.err
