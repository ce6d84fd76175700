"""What the README shows works: its network compiles, its commands parse, its Python runs, its links lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.cli import main
from mbc.cli.arguments import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "examples").rglob("README.md")),
    ROOT / "docs" / "errors.md",
    ROOT / "docs" / "memory.md",
    ROOT / "docs" / "plans.md",
]


def _blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    found: list[str] = []
    inside: str | None = None
    for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("```"):
            if inside is None and line[3:].strip() == language:
                found.append("")
            inside = line[3:].strip() if inside is None else None
        elif inside == language:
            found[-1] += line
    return found


def _commands() -> list[str]:
    text = "".join(block for page in PAGES for block in _blocks(page, "console")).replace("\\\n", " ")
    return [line[2:].split("#")[0] for line in text.splitlines() if line.startswith("$ mbc ")]


@pytest.mark.parametrize("command", _commands())
def test_commands_parse(command):
    if "COMMAND" not in command:
        parse(shlex.split(command)[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_network_and_the_python_of_the_readme(tmp_path, monkeypatch):
    (network,) = [block for block in _blocks(ROOT / "README.md", "") if block.startswith("network")]
    (code,) = _blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", "")  # nothing to build with, and no GPU
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    Path("net.mbc").write_text(network)
    assert main(["compile", "net.mbc", "--gpu", "h200", "--set", "train.precision=fp32"]) == 0
    generator = np.random.default_rng(0)
    images = generator.normal(size=(70, 1, 8, 8)).astype(np.float32)
    Path("build").mkdir()
    np.savez("build/digits.train.npz", images=images, labels=generator.integers(0, 10, 70))
    names: dict[str, Any] = {}
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    with pytest.warns(RuntimeWarning, match="running on the CPU"):
        exec(compile(code, "README.md", "exec"), names)
    assert names["logits"].shape == (64, 10)
    assert Path("weights.safetensors").exists()
    sys.modules.pop("digits", None)
