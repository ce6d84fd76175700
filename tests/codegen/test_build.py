"""Packages: written whole or not at all, and built if the tools are installed."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.codegen import build as build_module
from mbc.codegen.build import LIBRARY, PLAN_ONLY, _copy_sources, build, write_package, write_sources
from mbc.codegen.objects import code_option
from mbc.codegen.render_sources import every_kernel_file
from mbc.codegen.toolchain import Places, Toolchain, find_toolchain
from mbc.codegen.view import view
from mbc.errors import MbcError
from mbc.hardware.datasheet import MULTIPROCESSORS, OLDEST_CAPABILITY
from mbc.ir.types import Precision
from mbc.plan.model import Plan
from tests.codegen.plans import providers, small_plan

NOTHING = find_toolchain({"PATH": ""}, Places())


@pytest.fixture(autouse=True)
def stand_in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the hand-made plan, which is not a valid one, with test providers and a short text in place of its file."""
    monkeypatch.setattr(build_module, "view", lambda plan: view(plan, providers()))
    monkeypatch.setattr(build_module, "dump_plan", lambda plan: f"{plan.graph.name}\n")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_without_tools_all_but_the_library_is_written(tmp_path: Path) -> None:
    package = write_package((small_plan(),), tmp_path / "net", NOTHING)
    assert package.library is None
    assert [missing.name for missing in package.missing] == [
        "nvcc", "g++", "the CUDA runtime", "cuDNN 9", "cuBLASLt",
    ]  # fmt: skip
    files = _files(tmp_path / "net")
    generated = {f"source/{program.file}" for program in view(small_plan(), providers()).generated}
    assert {"plan.json", "__init__.py", "source/program.cpp", "source/widen.cu", *generated} <= files and generated
    assert _names(tmp_path) == ["net"]


def test_fp64_has_no_sources(tmp_path: Path) -> None:
    plan = small_plan()
    plan = replace(plan, graph=replace(plan.graph, precision=Precision.FP64))
    package = write_package((plan,), tmp_path / "net", NOTHING)
    assert package.library is None and not package.missing, "nothing that could be installed"
    assert _files(tmp_path / "net") == {".mbc-package", "plan.json", "__init__.py"}


def test_existing_folders_are_kept(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(MbcError) as caught:
            write_package((small_plan(),), mine, NOTHING, overwrite)
        assert caught.value.code == "MBC093"
        assert "exists and was not made by mbc" in str(caught.value)
    assert _files(mine) == {"thesis.txt"}


def test_packages_are_replaced_only_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "net"
    folder.mkdir()  # empty: nobody's
    write_package((small_plan(),), folder, NOTHING)
    (folder / "old").write_text("")
    with pytest.raises(MbcError) as caught:
        write_package((small_plan(),), folder, NOTHING)
    assert "pass --force" in str(caught.value)
    write_package((small_plan(),), folder, NOTHING, overwrite=True)
    assert "old" not in _files(folder)
    assert _names(tmp_path) == ["net"]


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MbcError) as caught:
        write_package((small_plan(),), tmp_path / "file" / "net", NOTHING)
    assert caught.value.code == "MBC094"
    assert "cannot write" in str(caught.value)


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    failing = tmp_path / "tools" / "cc"
    failing.parent.mkdir()
    failing.write_text("#!/bin/sh\necho 'program.cpp:1: no such thing'\nexit 1\n")
    failing.chmod(0o755)
    part = build_module.Part(tmp_path, tmp_path, "lib.so.1")
    toolchain = Toolchain(failing, failing, part, part, part, ("sm_90",), ())
    with pytest.raises(MbcError) as caught:
        write_package((small_plan(),), tmp_path / "net", toolchain)
    assert caught.value.code == "MBC095" and "could not build the generated code:" in caught.value.message
    assert "program.cpp:1: no such thing" in str(caught.value)
    assert _names(tmp_path) == ["tools"]


def test_architectures_that_nvcc_does_not_know(tmp_path: Path) -> None:
    part = build_module.Part(tmp_path, tmp_path, "lib.so.1")
    toolchain = Toolchain(tmp_path, tmp_path, part, part, part, ("sm_75", "sm_80"), ())
    package = write_package((small_plan(),), tmp_path / "net", toolchain)
    assert str(package.missing[0]).startswith("nvcc for sm_90 (this one compiles for sm_75 to sm_80)")


def test_gpus_too_old_for_the_toolkit_are_for_plans(tmp_path: Path) -> None:
    plan = small_plan()
    old = replace(plan, target=replace(plan.target, architecture="sm_37"))
    package = write_package((old,), tmp_path / "net", NOTHING)
    assert [str(missing) for missing in package.missing] == [str(PLAN_ONLY)] and package.library is None
    assert {"plan.json", "__init__.py"} <= _files(tmp_path / "net")
    # A toolkit that can still make the code is not refused.
    part = build_module.Part(tmp_path, tmp_path, "lib.so.1")
    older = Toolchain(None, tmp_path, part, part, part, ("sm_37",), ())
    package = write_package((old,), tmp_path / "older", older)
    assert [missing.name for missing in package.missing] == ["nvcc"]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_builds_with_the_real_headers(tmp_path: Path, precision: Precision) -> None:
    toolchain = find_toolchain()
    if toolchain.missing:
        pytest.skip("needs " + "; ".join(missing.name for missing in toolchain.missing))
    plan: Plan = small_plan(precision)
    rows = view(plan, providers())
    write_sources(rows, "test", tmp_path / "source")
    build(rows, tmp_path / "source", tmp_path / LIBRARY, toolchain)
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(tmp_path / LIBRARY)], capture_output=True, text=True)
    for name in ("mbc_create", "mbc_warm", "mbc_capture", "mbc_run", "mbc_run_eager", "mbc_last_error", "mbc_destroy"):
        assert f" T {name}\n" in symbols.stdout


ARCHITECTURES = [f"sm_{capability}" for capability in MULTIPROCESSORS if capability >= OLDEST_CAPABILITY]
# Sources whose instructions depend on the architecture: tensor cores, asynchronous copies, wgmma.
SOURCES = ("attention_mma.cu", "conv1x1.cu", "tf32_filter_gradient.cu", "relu_mask.cu")
PAIRS = [(architecture, source) for architecture in ARCHITECTURES for source in SOURCES]
USUAL = [("sm_120", "relu_mask.cu")]  # one that `make test` compiles


@pytest.mark.parametrize(
    ("architecture", "source"),
    [*USUAL, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in PAIRS if pair not in USUAL)],
)
def test_sources_compile(tmp_path: Path, architecture: str, source: str) -> None:
    _copy_sources((), tuple(every_kernel_file()), tmp_path)
    nvcc = find_toolchain().nvcc
    if nvcc is None:
        pytest.skip("there is no nvcc")
    options = f"-std=c++17 -O0 -Xptxas -O0 -DMBC_WORKING=2 -I. -Xcompiler -fPIC {code_option(architecture, source)}"
    command = [str(nvcc), *options.split(), "-c", source, "-o", "a.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
