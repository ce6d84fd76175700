"""Examples in pages work: networks compile, commands parse and print the text under them, and Python runs.

`pytest tests/test_readme.py --update-expected` writes the outputs again: read the difference before you commit.
"""

from __future__ import annotations

import importlib
import math
import re
import shlex
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.cli import main
from mbc.cli.arguments import parse
from mbc.frontend.parse import parse as parse_source
from mbc.frontend.pytorch import Place, answer
from mbc.ir.graph import Attributes
from mbc.ops import KINDS
from mbc.ops.framework_calls import Calls
from mbc.ops.pointwise import Pointwise
from mbc.source import Source
from tests.pages import Shown, blocks, brought_up_to_date, first_difference, shown, with_output

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
MOST_README_BYTES = 10_000
PAGES = [
    README,
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# Their output is of a machine with a GPU, of other frameworks, or of what this machine has installed.
OF_A_MACHINE = ("bench", "doctor", "profile", "gpus")
# Makes what commands of a page begin with: plans that other pages make.
BEFORE = {
    "docs/plans.md": (
        "mbc compile examples/01_digits/net.mbc -o digits --gpu h200",
        "mbc compile examples/alexnet.mbc --gpu h200 --set batch=256 --workspace-limit 32MiB --policy all -o alexnet32",
    ),
    "docs/checking.md": ("mbc compile examples/01_digits/net.mbc -o digits --gpu h200",),
}


def _commands() -> list[str]:
    every = (show.command for page in PAGES for show in shown(page.read_text(encoding="utf-8")))
    return list(dict.fromkeys(command for command in every if command.startswith("mbc ")))


@pytest.mark.parametrize("command", _commands())
def test_commands_parse(command):
    if "COMMAND" not in command:
        assert callable(parse(shlex.split(command)[1:]).run)


def _pages_with_output() -> list[Path]:
    return [page for page in PAGES if any(_comparable(show) for show in shown(page.read_text(encoding="utf-8")))]


def _comparable(show: Shown) -> bool:
    words = show.command.split()
    return bool(show.output) and words[0] == "mbc" and words[1] not in OF_A_MACHINE


@pytest.mark.parametrize("page", _pages_with_output(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_print_the_output_on_pages(page: Path, update_expected: bool, tmp_path, monkeypatch, capsys):
    _alone(tmp_path, monkeypatch)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    _data(tmp_path)
    wrong: list[str] = []
    for command in BEFORE.get(page.relative_to(ROOT).as_posix(), ()):
        assert main(shlex.split(command)[1:]) == 0
    for show in shown(page.read_text(encoding="utf-8")):
        if not _comparable(show):
            continue
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = main(shlex.split(show.command)[1:])
        said = capsys.readouterr()
        printed = (said.out if code == 0 else said.err).splitlines()
        missing = first_difference(show.output, printed)
        if missing and update_expected:
            with_output(page, show.command, show.output, brought_up_to_date(show.output, printed))
        elif missing:
            wrong.append(f"{show.command}\n    does not print: {missing}")
    assert not wrong, "\n".join(wrong)


def test_the_error_of_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    unnamed = blocks(README.read_text(encoding="utf-8"), "")
    (network,) = [block for block in unnamed if block.startswith("network")]
    (error,) = [block for block in unnamed if block.startswith("error")]
    Path("net.mbc").write_text(network.replace("|> conv", "|> cnov"))
    assert main(["compile", "net.mbc", "--gpu", "h200"]) == 1
    assert capsys.readouterr().err.endswith(error)


NOT_RUN = {"MBC303": "needs a model of PyTorch"}  # errors in blocks whose command a test cannot run


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_without_a_language_are_commands_sources_or_errors(page, tmp_path, monkeypatch, capsys):
    _alone(tmp_path, monkeypatch)
    for block in blocks(page.read_text(encoding="utf-8"), ""):
        first = block.split(maxsplit=2)
        if first[0] == "mbc":
            for line in block.splitlines():
                command = re.split(r"\s{2,}| [<>] ", line)[0]
                assert callable(parse(shlex.split(command)[1:]).run), line
        elif first[0] in ("network", "train", "memory"):
            assert parse_source(Source("net.mbc", block))
        elif first[0] == "error" and page != README and first[1].rstrip(":") not in NOT_RUN:
            assert _error_of(block, capsys) == block
        else:
            assert first[0] == "error", f"say which language this is (text, if none):\n{block}"


def _error_of(block: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the compiler's message about a source with the line of a page's error message, at that line's number."""
    number, line = re.findall(r"^ +(\d+) \| (.*)$", block, re.MULTILINE)[0]
    before = ["network page(batch = 4) {", "  input image[batch, 3, 8, 8] : float"]
    assert int(number) == len(before) + 1
    Path("net.mbc").write_text("\n".join([*before, line, "}"]) + "\n")
    assert main(["compile", "net.mbc", "--gpu", "h200"]) == 1
    return capsys.readouterr().err


def test_definition_of_equal_outputs():
    printed = ["first", "  package    x (planned in 1.2 s, built in 3.0 s)", "third 7", "last"]
    assert first_difference(["first", "  package    x (planned in 9.9 s)", "third 7", "last"], printed) == ""
    assert first_difference(["first", "...", "last"], printed) == ""
    assert first_difference(["first", "...", "third 8", "..."], printed) == "third 8"
    assert first_difference(["third 7", "last"], printed) == "third 7"  # nothing says that lines are left out
    assert first_difference(["first"], printed).startswith("(the command goes on: ")
    assert brought_up_to_date(["first", "...", "third 8", "..."], printed) == ["first", "...", "third 7", "..."]


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= MOST_README_BYTES


def test_the_table_of_pytorch_is_the_compilers():
    rows = re.findall(r"^\| `nn\.(\w+)[^|]*` \| `(\w+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 5
    for name, ours in rows:
        layer = answer(name, Place.OPERATION, Place.LOSS)
        assert layer is not None and layer.equivalent.startswith(ours), name


def test_the_diffs_of_contributing_are_those_of_the_tree():
    checked = 0
    for block in blocks((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "diff"):
        for part in block.split("+++ ")[1:]:
            path, *lines = part.splitlines()
            text = (ROOT / path).read_text(encoding="utf-8").splitlines()
            for line in lines:
                assert line.removeprefix("+") in text, f"{path} has no line {line}"
                checked += 1
    assert checked > 10


def test_architecture_has_the_stages_and_packages_of_the_compiler():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    pipeline = page.split("## The pipeline")[1].split("\n## ")[0]
    named = [
        name for row in re.findall(r"^\| (`[^|]*)\|", pipeline, re.MULTILINE) for name in re.findall("`(.+?)`", row)
    ]
    sources = [(ROOT / "mbc" / file).read_text(encoding="utf-8") for file in ("compiler.py", "planner.py")]
    assert sorted(named) == sorted(set(re.findall(r"stages\.run\(\s*\"([^\"]+)\"", "".join(sources))))
    packages = {path.parent.name for path in (ROOT / "mbc").glob("*/__init__.py")}
    packages |= {path.parent.name for path in (ROOT / "mbc" / "optimize").glob("*/__init__.py")}
    assert not {name for name in packages if f"`{name}/`" not in page}


def test_the_operation_of_contributing_is_a_function_with_its_gradient():
    (block,) = blocks((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "python")
    names: dict[str, Any] = {
        "Attributes": Attributes, "Calls": Calls, "Pointwise": Pointwise, "dataclass": dataclass,
        "math": math, "np": np,
    }  # fmt: skip
    exec(block, names)
    function: Pointwise = names["SQUAREPLUS"]
    (layer,) = function.layers
    assert [(setting.name, setting.default) for setting in layer.parameters] == [("b", 4.0)]
    a, x, step = function.attributes(), np.linspace(-3, 3, 13), 1e-6
    slope = (function.forward(a, x + step) - function.forward(a, x - step)) / (2 * step)
    np.testing.assert_allclose(function.backward(a, x, np.ones_like(x)), slope, rtol=1e-6)
    single = x.astype(np.float32)
    assert function.forward(a, single).dtype == function.backward(a, single, single).dtype == np.float32
    assert not {"squareplus", "squareplus_backward"} & KINDS.keys(), "the example is no new operation any more"


def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move to an empty folder, and hide all compilers and GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def _data(folder: Path) -> None:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(70, 1, 8, 8)).astype(np.float32)
    (folder / "build").mkdir()
    np.savez(folder / "build" / "digits.train.npz", images=images, labels=generator.integers(0, 10, 70))


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_the_network_of_the_readme_and_the_python_of_pages(page, tmp_path, monkeypatch):
    (network,) = [block for block in blocks(README.read_text(encoding="utf-8"), "") if block.startswith("network")]
    code = "\n".join(blocks((ROOT / page).read_text(encoding="utf-8"), "python"))
    _alone(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("net.mbc").write_text(network)
    averages = () if page == "README.md" else ("--set", "train.ema=0.9999")  # of which the other page tells
    assert main(["compile", "net.mbc", "--gpu", "h200", "--set", "train.precision=fp32", *averages]) == 0
    _data(tmp_path)
    names: dict[str, Any] = {}
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    with pytest.warns(RuntimeWarning, match="running on the CPU"):
        exec(compile(code, page, "exec"), names)
    assert names["logits"].shape == (64, 10)
    assert Path("weights.safetensors").exists()
    sys.modules.pop("digits", None)
