"""Digests of the code: what a program does decides them, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc import provenance
from mbc.provenance import digest_of, digests, meaning
from mbc.resources import folder

PYTHON = '''
"""About this file."""
from typing import Final

RATE: Final = 0.5

def scaled(values: list[float], by: float = RATE) -> list[float]:
    """Every value times `by`."""
    return [f"{by}" and value * by for value in values]  # not in place
'''

SAME_PYTHON = """
from typing import Final
RATE: Final = 0.5  # a half


def scaled(
    values: list[float],
    by: float = RATE,
) -> list[float]:
    # Not in place.
    return [
        f"{by}" and value * by for value in values
    ]
"""

CUDA = """
// Adds one.
template <typename T> __global__ void plus_one(T *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; /* of all */
  if (i < n) x[i] += T(1'000) - T('\\'') + (sizeof("// no comment") >> 3);
}
"""

SAME_CUDA = """
template <typename T>
__global__ void plus_one(T* x, int n)
{
    int i = blockIdx.x*blockDim.x + threadIdx.x;
    // It's in range.
    if (i < n)
        x[i] += T(1'000) - T('\\'') + (sizeof("// no comment")>>3);
}
"""


@pytest.mark.parametrize(("name", "one", "other"), [("a.py", PYTHON, SAME_PYTHON), ("a.cu", CUDA, SAME_CUDA)])
def test_comments_and_layout_mean_nothing(name: str, one: str, other: str) -> None:
    assert one != other and meaning(name, one.encode()) == meaning(name, other.encode())


@pytest.mark.parametrize(
    ("name", "text", "old", "new"),
    [
        ("a.py", PYTHON, "0.5", "0.25"),
        ("a.py", PYTHON, "value * by", "value + by"),
        ("a.py", PYTHON, '{by}"', '{by} "'),
        ("a.py", PYTHON, "by: float = RATE", "by: float"),
        ("a.py", PYTHON, "0.5", "'0.5'"),
        ("a.cu", CUDA, "i < n", "i <= n"),
        ("a.cu", CUDA, "1'000", "1'001"),
        ("a.cu", CUDA, "no comment", "a comment"),
        ("a.cu", CUDA, ">> 3", "> 3"),
        ("a.cpp.j2", CUDA, "x[i] +=", "{{ x }}[i] +="),
        ("a.json", '{"a": 1}', "1", "2"),
        ("a.gz", "\x00", "\x00", "\x01"),
    ],
)
def test_every_change_of_what_is_done_is_seen(name: str, text: str, old: str, new: str) -> None:
    assert old in text
    assert meaning(name, text.encode()) != meaning(name, text.replace(old, new, 1).encode())


def test_a_kernel_of_today(tmp_path: Path) -> None:
    """Each real kernel file: a comment more is none, a statement more is another digest."""
    kernels = sorted((folder("templates") / "kernels").rglob("*.cu*"))
    assert len(kernels) > 50
    for kernel in kernels:
        text = kernel.read_text(encoding="utf-8")
        files = {kernel.name: kernel}
        copy = tmp_path / kernel.name
        copy.write_text(f"// {kernel.name}: it's one comment\n\n{text}/* and\none more */\n", encoding="utf-8")
        assert digest_of({kernel.name: copy}) == digest_of(files), kernel.name
        before, _, after = text.rpartition("}")
        copy.write_text(f"{before};}}{after}", encoding="utf-8")
        assert digest_of({kernel.name: copy}) != digest_of(files), kernel.name


def test_a_file_more_or_of_another_name_is_seen(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    one, both = {"a.py": tmp_path / "a.py"}, {name: tmp_path / name for name in ("b.py", "a.py")}
    assert digest_of(both) == digest_of(dict(reversed(both.items())))
    assert len({digest_of(one), digest_of(both), digest_of({"c.py": tmp_path / "a.py"})}) == 3


def test_what_digests_cover() -> None:
    """Each file that decides a result belongs to one part, and texts belong to none."""
    files = {part: set(provenance.files_of(part)) for part in digests()}
    assert {"templates/include/mbc_call.h", "templates/host/module.cpp", "kernels/cudnn.py"} <= files["kernels"]
    assert "templates/kernels/fused/concat.cu" in files["kernels/fused"]
    assert {"ops/convolution.py", "ir/graph.py"} <= files["operations"]
    assert {"optimize/search/search.py", "plan/model.py", "frontend/lower.py"} <= files["planner"]
    assert {"data/profiles/h200.sqlite.gz", "grammar/mbc.lark"} <= files["planner"]
    names = [name for part in files.values() for name in part]
    assert len(names) == len(set(names)) and not any(name.endswith((".md", ".pyc")) for name in names)
    assert all(files.values())
    families = {path.name for path in (folder("templates") / "kernels").iterdir() if path.is_dir()}
    assert set(provenance.FAMILIES) == families - {"shared"}
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests().values())
