"""Digests of the code change if and only if the behaviour of a program may change."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mbc import provenance
from mbc.provenance import digest_of, digests
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


def digest(name: str, *texts: str) -> str:
    """Return the digest of files with these texts."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}{name}" for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text, encoding="utf-8")
        return digest_of(files)


@pytest.mark.parametrize(("name", "one", "other"), [("a.py", PYTHON, SAME_PYTHON), ("a.cu", CUDA, SAME_CUDA)])
def test_comments_and_layout_mean_nothing(name: str, one: str, other: str) -> None:
    assert one != other and digest(name, one) == digest(name, other)


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
        ("a.cu", CUDA, "sizeof(", "alignof("),
        ("a.cu", CUDA, "int i", "long i"),
        ("a.cu", CUDA, ">> 3", "> 3"),
        ("a.cpp.j2", CUDA, "x[i] +=", "{{ x }}[i] +="),
        ("a.json", '{"a": 1}', "1", "2"),
        ("a.gz", "\x00", "\x00", "\x01"),
    ],
)
def test_every_change_of_behaviour_changes_the_digest(name: str, text: str, old: str, new: str) -> None:
    assert old in text
    assert digest(name, text) != digest(name, text.replace(old, new, 1))


def test_a_kernel_of_today(tmp_path: Path) -> None:
    """For each real kernel file: another comment does not change the digest, another statement does."""
    kernels = sorted((folder("templates") / "kernels").rglob("*.cu*"))
    assert len(kernels) > 50
    for kernel in kernels:
        text = kernel.read_text(encoding="utf-8")
        copy = tmp_path / kernel.name
        copy.write_text(f"// {kernel.name}: it's one comment\n\n{text}/* and\none more */\n", encoding="utf-8")
        assert digest_of([copy]) == digest_of([kernel]), kernel.name
        before, _, after = text.rpartition("}")
        copy.write_text(f"{before};}}{after}", encoding="utf-8")
        assert digest_of([copy]) != digest_of([kernel]), kernel.name


def test_names_of_files_and_identifiers_mean_nothing() -> None:
    renamed = PYTHON.replace("values", "rows").replace("scaled", "by_rate").replace("RATE", "FACTOR")
    assert digest("a.py", PYTHON) == digest("b.py", renamed)
    assert digest("a.py", "from mbc.b import f\nf(1)\n") == digest("a.py", "from mbc.a import g, h\ng(1)\n")
    assert digest("a.py", 'raise ValueError("no")\n') == digest("a.py", 'raise ValueError("never")\n')
    assert digest("a.cu", CUDA) == digest(
        "a.cu", CUDA.replace("plus_one", "add_one").replace("T *x", "T *y").replace("x[", "y[")
    )
    assert digest("a.cu", '#include "a.h"\nint f();') == digest("a.cu", '#include "b.h"\nint g();')


def test_another_function_is_seen() -> None:
    for one, other in (
        ("import numpy as np\nnp.exp(1)\n", "import numpy as np\nnp.log(1)\n"),
        ("from math import exp\nexp(1)\n", "from math import log\nlog(1)\n"),
        ("max(1, 2)\n", "min(1, 2)\n"),
        ("x = 1\ny = 2\nx - y\n", "x = 1\ny = 2\ny - x\n"),
        ("def f(x, y):\n    return x\n", "def f(x, y):\n    return y\n"),
    ):
        assert digest("a.py", one) != digest("a.py", other), one
    assert digest("a.cu", "float f(float x) { return exp(x); }") != digest(
        "a.cu", "float f(float x) { return log(x); }"
    )
    # Another file of the part tells the two names apart.
    defines = "class A:\n    x: int\n    y: int\n"
    assert digest("a.py", defines, "a.x\n") != digest("a.py", defines, "a.y\n")


def test_a_file_more_is_seen() -> None:
    assert digest("a.py", "x = 1\n") != digest("a.py", "x = 1\n", "x = 1\n")
    assert digest("a.py", "x = 1\n", "f(2)\n") == digest("a.py", "f(2)\n", "x = 1\n")


def test_coverage_of_digests() -> None:
    """Each file that influences a result belongs to one part of the code, and texts belong to none."""
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
