"""A kernel's measured times are those of its source, so that a changed source needs a decision about its version.

`kernel_versions.json` has a digest of the code of each source, without comments and blanks, and the versions of the
kernels in it. After a change raise the version of each kernel whose times may differ (`OwnKernel.version`), so that
profiles count its older times as estimates. Then `--update-expected` writes the file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mbc.kernels.cuda import KERNELS
from mbc.resources import folder
from tests.test_size import COMMENT

RECORDED = Path(__file__).with_name("kernel_versions.json")
SOURCES = folder("templates") / "kernels"


def digest(text: str) -> str:
    """Return a digest of code that depends on neither comments nor blanks."""
    return hashlib.sha256(" ".join(COMMENT.sub(" ", text).split()).encode()).hexdigest()[:12]


def versions() -> dict[str, list[object]]:
    """Return the digest of each source, and the versions of its kernels above 1."""
    sources: dict[str, list[object]] = {}
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        name = path.relative_to(SOURCES).as_posix()
        own = {kernel.name: kernel.version for kernel in KERNELS.values() if name in kernel.files}
        raised_versions = {kernel: version for kernel, version in sorted(own.items()) if version > 1}
        sources[name] = [digest(path.read_text(encoding="utf-8")), raised_versions]
    return sources


def test_a_source_changes_only_with_a_decision_about_its_versions(update_expected: bool) -> None:
    today = versions()
    if update_expected:
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in today.items())
        RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    changed = sorted(name for name in {*recorded, *today} if recorded.get(name) != today.get(name))
    assert not changed, f"raise the versions of kernels in {changed} whose times differ, then --update-expected"


def test_a_digest_is_of_code_alone() -> None:
    assert digest("int a; // one\n") == digest("/* two */ int  a;\n\n") != digest("int b;")
