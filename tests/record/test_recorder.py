"""The native recorder: CUPTI's records become events with the launches of their nodes, and CUPTI's refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.hardware.target import LocalGpu
from mbc.record import recorder as recorder_file
from mbc.record.recorder import Recorder, check_on_gpu, recording_tools
from tests.record.cupti import COPY, FILL, KERNEL, PEER_COPY, fake_cupti, report_node, tools_or_skip


def test_records_of_every_kind_become_events_of_their_launch():
    with fake_cupti() as (tools, fake):
        recorder = Recorder(tools)
        assert fake.fake_subscribers() == 1 and fake.fake_enabled() == 4
        for launch, node in enumerate((11, 12, 13, 14)):
            report_node(recorder.listener, 0, launch, node)
        report_node(recorder.listener, 1, 0, 21)
        fake.fake_clone(12, 112)  # of an executable graph
        fake.fake_clone(112, 212)  # that was copied from another node
        fake.fake_ran(KERNEL, b"_Z3addPfi", 5000, 5600, 1, 11, 3, 7)
        fake.fake_ran(COPY, b"", 6000, 6100, 1, 212, 3, 8)
        fake.fake_ran(PEER_COPY, b"", 6200, 6300, 1, 13, 3, 8)
        fake.fake_ran(FILL, b"", 4000, 4001, 1, 14, 3, 7)
        fake.fake_ran(KERNEL, b"plain", 7000, 7100, 2, 21, 4, 7)
        fake.fake_ran(KERNEL, b"outside", 1000, 1100, 3, 0, 0, 7)  # of no graph: the warm-up
        fake.fake_ran(KERNEL, b"stranger", 8000, 8100, 1, 99, 3, 7)  # of an unreported node
        events = recorder.stop()
        assert fake.fake_enabled() == 0
        recorder.close()
        assert fake.fake_subscribers() == 0
    assert [(e.name, e.start_ns, e.end_ns, e.call, e.graph, e.stream, e.program, e.launch) for e in events] == [
        ("memset", 4000, 4001, 1, 3, 7, "train", 3),
        ("add(float*, int)", 5000, 5600, 1, 3, 7, "train", 0),
        ("memcpy DtoH", 6000, 6100, 1, 3, 8, "train", 1),
        ("memcpy PtoP", 6200, 6300, 1, 3, 8, "train", 2),
        ("plain", 7000, 7100, 2, 4, 7, "infer", 0),
        ("stranger", 8000, 8100, 1, 3, 7, None, None),
    ]


def test_a_recorder_begins_with_nothing():
    for _ in range(2):
        with fake_cupti() as (tools, fake):
            recorder = Recorder(tools)
            fake.fake_ran(KERNEL, b"a", 1, 2, 1, 5, 1, 1)
            assert [event.node for event in recorder.stop()] == [5]
            recorder.close()


def test_lost_records_are_no_measurement():
    with fake_cupti() as (tools, fake):
        recorder = Recorder(tools)
        fake.fake_drop(3)
        with pytest.raises(MbcError) as caught:
            recorder.stop()
        recorder.close()
    assert caught.value.code == "MBC366" and "CUPTI dropped 3 records of work on the GPU" in caught.value.message


@pytest.mark.parametrize(
    ("status", "code", "words", "remedy"),
    [
        (39, "MBC367", "another tool uses CUPTI in this process, and CUPTI serves only one tool", "PyTorch"),
        (35, "MBC366", "CUPTI refuses to record: cuptiSubscribe: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES", "root"),
        (999, "MBC366", "CUPTI refuses to record: cuptiSubscribe: CUPTI_ERROR_UNKNOWN (CUptiResult 999)", "newer"),
    ],
)
def test_refusals_of_cupti(status: int, code: str, words: str, remedy: str):
    with fake_cupti(status) as (tools, fake):
        with pytest.raises(MbcError) as caught:
            Recorder(tools)
        assert fake.fake_subscribers() == 0 and fake.fake_enabled() == 0
    assert caught.value.code == code and words in caught.value.message and remedy in caught.value.remedy


def test_a_cupti_that_does_not_load(tmp_path: Path):
    tools = tools_or_skip()
    assert tools.gxx is not None and tools.cupti is not None
    with fake_cupti() as (fake_tools, _):
        assert fake_tools.cupti is not None
        library = tmp_path / "libcupti.so.98"
        library.write_bytes((fake_tools.cupti.library_folder / fake_tools.cupti.library).read_bytes())
        part = replace(fake_tools.cupti, library_folder=tmp_path, library=library.name)
        original = recorder_file.make_library

        def without(*arguments: Any) -> None:
            original(*arguments)
            library.unlink()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorder_file, "make_library", without)
            with pytest.raises(MbcError) as caught:
                Recorder(replace(fake_tools, cupti=part))
    assert caught.value.code == "MBC366" and "CUPTI does not load: libcupti.so.98" in caught.value.message


def test_the_real_cupti_compiles_and_loads():
    """CUPTI refuses to record without a driver; tests/gpu records a graph with a driver.

    The test runs in a process of its own, in which no other recorder has subscribed.
    """
    tools_or_skip()
    code = (
        "from mbc.codegen.toolchain import find_toolchain\n"
        "from mbc.errors import MbcError\n"
        "from mbc.record.recorder import Recorder\n"
        "try:\n    recorder = Recorder(find_toolchain())\n"
        "except MbcError as error:\n    print(error.code, error.message)\n"
        "else:\n    print(recorder.stop())\n    recorder.close()\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})  # fmt: skip  # noqa: E501
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip()
    assert said == "()" or said.startswith("MBC366 CUPTI refuses to record: cuptiSubscribe: CUPTI_ERROR_"), said


def test_parts_that_recording_needs(monkeypatch: pytest.MonkeyPatch):
    def refused(device: str) -> MbcError:
        with pytest.raises(MbcError) as caught:
            recording_tools(device)
        assert caught.value.code == "MBC365"
        return caught.value

    monkeypatch.setattr(recorder_file, "current_gpu", lambda: None)
    assert "there is no GPU here: the work of a step is recorded on a GPU only" in refused("auto").message
    gpu = LocalGpu("Fake", "580", "sm_90", 1 << 35, 1 << 34)
    monkeypatch.setattr(recorder_file, "current_gpu", lambda: gpu)
    assert "steps run on the CPU here: the work of a step is recorded on a GPU only" in refused("cpu").message
    check_on_gpu("cuda")
    tools = tools_or_skip()
    assert recording_tools("auto") == tools
    monkeypatch.setattr(recorder_file, "find_toolchain", lambda: replace(tools, cupti=None))
    error = refused("cuda")
    assert "steps cannot be recorded without CUPTI (times what a GPU runs)" in error.message
    assert "nvidia-cuda-cupti" in error.remedy
