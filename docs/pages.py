"""A hook of MkDocs: pages of the site that lie outside docs/, and the links to them; the pages of the gallery, planned.

The page of the benchmarks (with its pictures), the page of the language and the change log keep their places in the
repository, where people look for them; in the site they are benchmarks/README.md, LANGUAGE.md and CHANGELOG.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gallery import make

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "CHANGELOG.md", content=changes))
    language = (ROOT / "grammar" / "LANGUAGE.md").read_text(encoding="utf-8").replace("](../docs/", "](")
    files.append(File.generated(config, "LANGUAGE.md", content=language))
    benchmarks = ROOT / "benchmarks"
    page = (benchmarks / "README.md").read_text(encoding="utf-8").replace("](../docs/", "](../")
    files.append(File.generated(config, "benchmarks/README.md", content=page))
    for path in sorted((benchmarks / "results").rglob("*")):
        name = path.relative_to(benchmarks).as_posix()
        if f"]({name})" in page:
            files.append(File.generated(config, f"benchmarks/{name}", abs_src_path=str(path)))
    for path in make(ROOT / "build" / "gallery"):
        files.append(File.generated(config, f"gallery/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of docs/, as they are in the repository, lead to the pages above; those to examples are their texts."""
    markdown = re.sub(r"\[([^]]+)\]\(\.\./examples/[^)]*\)", r"\1", markdown)
    for there, here in (("benchmarks/", "benchmarks/"), ("grammar/", ""), ("CHANGELOG.md", "CHANGELOG.md")):
        markdown = markdown.replace(f"](../{there}", f"]({here}")
    return markdown
