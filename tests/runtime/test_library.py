"""Loading a built library: its description of itself is compared with the plan."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.plan.model import Plan
from mbc.resources import folder as resource_folder
from mbc.runtime.library import ABI_VERSION, LIBRARY_FILE, Library
from tests.runtime.nets import small_plan

SOURCE = """
#include "mbc_module.h"
struct MbcModule { int runs; };
bool numbered(const MbcRanks& ranks) {
  return ranks.all_reduce == (decltype(ranks.all_reduce))1 && ranks.async_error == (decltype(ranks.async_error))2 &&
         ranks.error_string == (decltype(ranks.error_string))3 && ranks.communicator == (void*)4;
}
int mbc_abi_version() { return ABI; }
size_t mbc_cudnn_version() { return 91901; }
uint64_t mbc_arena_bytes() { return ARENA; }
uint64_t mbc_host_bytes() { return 0; }
uint64_t mbc_peer_bytes() { return 0; }
int mbc_create(void* arena, uint64_t bytes, void* host, uint64_t, void* peer, uint64_t, void* const* streams,
               const MbcRanks* ranks, MbcModule** module) {
  *module = nullptr;
  if (ranks != nullptr && !numbered(*ranks)) return 1;
  if (bytes != ARENA || host != nullptr || peer != nullptr || streams[2] != (void*)33) return 1;
  *module = new MbcModule{0};
  return 0;
}
int mbc_warm(MbcModule*) { return 0; }
int mbc_capture(MbcModule*) { return 0; }
int mbc_run(MbcModule* module, int program) { return program == 1 ? 7 : 0; }
int mbc_run_eager(MbcModule*, int) { return 0; }
#ifndef OLD
int mbc_capture_told(MbcModule*, MbcNodeOfLaunch tell) { return tell == (MbcNodeOfLaunch)5 ? 0 : 7; }
int mbc_run_launch(MbcModule*, int program, int64_t launch) { return program == 1 && launch == 4294967296 ? 0 : 7; }
#endif
const char* mbc_last_error(MbcModule* module) { return module ? "launch 3, 'conv': bad luck" : "no arena"; }
void mbc_destroy(MbcModule* module) { delete module; }
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    plan = small_plan()
    return replace(plan, target=replace(plan.target, cudnn=91900))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> Path:
    return build(tmp_path_factory.mktemp("library"), plan)


def build(folder: Path, plan: Plan, *flags: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to build a library to load")
    (folder / "module.cpp").write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", *flags, f"-DABI={ABI_VERSION}", f"-DARENA={plan.predictions.arena_bytes}",
               f"-I{resource_folder('templates') / 'include'}", str(folder / "module.cpp"),
               "-o", str(folder / LIBRARY_FILE)]  # fmt: skip
    subprocess.run(command, check=True)
    return folder


def test_calls_and_their_failures(plan: Plan, built: Path):
    library = Library(plan, built)
    library.create(256, plan.predictions.arena_bytes, 0, 0, 0, 0, [11, 22, 33])
    library.warm()
    library.capture()
    library.run("train", eager=False)
    library.run("infer", eager=True)
    with pytest.raises(MbcError) as caught:
        library.run("infer", eager=False)
    assert caught.value.code == "MBC159"
    assert caught.value.message == "on the GPU: launch 3, 'conv': bad luck"
    library.destroy()
    library.destroy()
    with pytest.raises(MbcError, match="no arena"):
        Library(plan, built).create(256, 1, 0, 0, 0, 0, [11, 22, 33])


def test_launches_are_run_one_by_one(plan: Plan, built: Path, tmp_path: Path):
    library = Library(plan, built)
    library.run_launch("infer", 1 << 32)
    library.capture(5)
    with pytest.raises(MbcError) as caught:
        library.run_launch("train", 3)
    assert caught.value.code == "MBC159"
    old = build(tmp_path, plan, "-DOLD")
    with pytest.raises(MbcError) as caught:
        Library(plan, old).run_launch("train", 3)
    assert caught.value.code == "MBC158"
    assert (
        caught.value.message
        == f"'{old / LIBRARY_FILE}' was built by an older mbc, which cannot run launches one by one"
    )


def test_an_older_library_tells_nobody_of_its_nodes(plan: Plan, tmp_path: Path):
    old = build(tmp_path, plan, "-DOLD")
    with pytest.raises(MbcError) as caught:
        Library(plan, old).capture(5)
    assert caught.value.code == "MBC158"
    assert "was built by an older mbc, which does not report the launch of a graph's node" in caught.value.message


def test_a_library_of_another_plan(plan: Plan, built: Path):
    other = replace(plan, predictions=replace(plan.predictions, arena_bytes=512))
    with pytest.raises(MbcError, match="was built for another plan") as caught:
        Library(other, built)
    assert caught.value.code == "MBC158"


def test_another_cudnn(plan: Plan, built: Path):
    other = replace(plan, target=replace(plan.target, cudnn=92800))
    with pytest.raises(MbcError, match=r"the plan is for cuDNN 9\.28\.0, but 9\.19\.1 was loaded") as caught:
        Library(other, built)
    assert caught.value.code == "MBC156"
    assert "nvidia-cudnn-cu13==9.28.*" in caught.value.remedy


def test_what_is_no_library(plan: Plan, tmp_path: Path):
    (tmp_path / LIBRARY_FILE).write_bytes(b"text")
    with pytest.raises(MbcError, match="cannot load") as caught:
        Library(plan, tmp_path)
    assert caught.value.code == "MBC157"
