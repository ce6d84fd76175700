"""Source text from rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mbc.codegen.render_sources import kernel_files, render, render_module
from mbc.codegen.view import Launcher, view
from mbc.errors import MbcError
from tests.codegen.plans import providers, small_plan


def test_reruns_are_identical() -> None:
    first, second = (render(view(small_plan(), providers()), "1.0") for _ in range(2))
    assert first == second
    assert sorted(first) == [*(program.file for program in view(small_plan(), providers()).generated), "program.cpp"]


def test_one_commented_row_a_launch() -> None:
    lines = render(view(small_plan(), providers()), "1.0")["program.cpp"].splitlines()
    row = next(line for line in lines if line.startswith("/* 1 conv (cudnn convolution engine=-1) rows 5..8 */"))
    numbers = [int(word) for word in row.partition("*/ ")[2].strip(",").split(",")]
    launcher, stream, accesses, integers, reals, waits = numbers[:6]
    assert (stream, accesses, reals, waits) == (0, 4, 0, 0)
    assert len(numbers) == 6 + accesses + integers
    assert '    "conv (cudnn convolution engine=-1) rows 5..8\\0"' in lines
    assert launcher < 7


@pytest.mark.parametrize("value", [0.1, 1e-300, -0.0, 2.0**-1074, math.pi, 3.0])
def test_reals_are_exact(value: float) -> None:
    rows = view(small_plan(), providers())
    rows = replace(rows, train=(replace(rows.train[3], reals=(value,)),))
    text = render(rows, "1.0")["program.cpp"]
    word = next(line for line in text.splitlines() if line.startswith("    /* 0 */")).split()[-1].rstrip(",")
    assert math.copysign(1, float.fromhex(word)) == math.copysign(1, value)
    assert float.fromhex(word) == value


def test_only_needed_kernels_are_compiled() -> None:
    rows = view(small_plan(), providers())
    assert kernel_files(rows) == ["moments.cu", "widen.cu"]
    legacy = replace(rows, libraries=("cudnn_legacy",))
    assert kernel_files(legacy) == ["widen.cu"]  # whose convolutions leave no sums


def test_unknown_kernel() -> None:
    rows = replace(view(small_plan(), providers()), launchers=(Launcher("kernel", "made_up", "mbc_made_up"),))
    with pytest.raises(MbcError) as caught:
        kernel_files(rows)
    assert caught.value.code == "MBC092"
    assert "no kernel called made_up" in str(caught.value)


@pytest.mark.parametrize("name", ['a"b', "a*/b", "a\\b", "a\nb", "{{ x }}", "é", "a/*b"])
def test_names_cannot_become_code(name: str) -> None:
    rows = view(small_plan(), providers())
    rows = replace(rows, train=(replace(rows.train[0], comment=name),))
    with pytest.raises(MbcError) as caught:
        render(rows, "1.0")
    assert caught.value.code == "MBC091"
    assert f"a name that cannot stand in generated code: {name!r}" in str(caught.value)


@pytest.mark.parametrize("name", ['G"""', "G\n#error", "G\\"])
def test_nor_can_a_gpu(name: str) -> None:
    plan = small_plan()
    plan = replace(plan, target=replace(plan.target, gpu=name))
    for rendering in (lambda: render_module(plan), lambda: render(view(plan, providers()), "1.0")):
        with pytest.raises(MbcError, match="a name that cannot stand in generated code") as caught:
            rendering()
        assert caught.value.code == "MBC091"


def test_module_text_is_python() -> None:
    text = render_module(small_plan())
    compile(text, "__init__.py", "exec")
    assert '"""small for NVIDIA H200' in text
