"""A hook of MkDocs that adds pages outside docs/ to the site, corrects the links to them, and plans the gallery.

The pages (of the benchmarks, the language, the examples and the changes) keep their places in the repository, where
people look for them. In the site they keep their paths, together with the files of their folders that they show or link
to.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gallery import linked, make

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "CHANGELOG.md", "benchmarks/README.md", "grammar/LANGUAGE.md", "examples/README.md", "examples/01_digits/README.md",
    "examples/data/README.md", "examples/pytorch/README.md",
)  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/, the files that these pages link to, and the gallery."""
    for name in OUTSIDE:
        up = "../" * name.count("/")
        page = (ROOT / name).read_text(encoding="utf-8").replace(f"]({up}docs/", f"]({up}")
        files.append(File.generated(config, name, content=page))
        for target in sorted(set(re.findall(r"\]\((?!\.\./|https?:|#)([^)#]+)\)", page))):
            path = (ROOT / name).parent / target
            beside = path.relative_to(ROOT).as_posix()
            if path.is_file() and not path.is_relative_to(ROOT / "docs") and beside not in OUTSIDE:
                files.append(File.generated(config, beside, abs_src_path=str(path)))
    for path in make(ROOT / "build" / "gallery"):
        files.append(File.generated(config, f"gallery/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with its links in the form that the site needs.

    Links out of docs/ lead to the pages that `on_files` adds, and titles in the gallery lead to the gallery's pages.
    """
    if page.file.src_uri == "gallery.md":
        markdown = linked(markdown)
    for name in OUTSIDE:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    return markdown
