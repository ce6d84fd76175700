"""The pages of docs/: links lead to existing places, the site lists every page, and decisions have a status."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

import gallery

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = (
    "CHANGELOG.md", "benchmarks/README.md", "grammar/LANGUAGE.md", "examples/README.md", "examples/01_digits/README.md",
    "examples/02_volumes/README.md", "examples/data/README.md", "examples/pytorch/README.md",
)  # fmt: skip
# Not on the site: pages for people who read the repository.
BESIDE = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "tests/README.md")
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in (*OUTSIDE, *BESIDE))]
PAGES += [page for page in sorted((ROOT / "examples").rglob("README.md")) if page not in PAGES]
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
STATUS = re.compile(r"accepted(, extended by \d{3}(, \d{3})*( and \d{3})?)?|superseded by \d{3}|tried and rejected")


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs and forges form them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_has_marks_of_a_merge(page: Path) -> None:
    assert not re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_site_links_the_pages_of_the_gallery() -> None:
    page = gallery.linked((DOCS / "gallery.md").read_text(encoding="utf-8"))
    assert sorted(re.findall(r"\]\(gallery/(.+?)\)", page)) == sorted(gallery.PAGES)


def test_the_texts_of_the_pipeline_fit_their_boxes() -> None:
    svg = (DOCS / "pipeline.svg").read_text(encoding="utf-8")
    for rect in re.finditer(r'<rect.* x="(\d+)".* width="(\d+)".*?/>(.*)', svg):
        for size, text in re.findall(r"<text(?: class=\"(\w+)\")? .*?>(.+?)</text>", rect[3]):
            width = len(text) * 0.55 * (11 if size == "small" else 13)  # of an average character
            assert width < int(rect[2]), text


def test_the_site_lists_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted([*pages, *OUTSIDE])


def test_decisions_are_listed_with_their_titles_and_statuses() -> None:
    rows = re.findall(
        r"^\| (\d{3}) \| \[(.+)\]\((.+)\) \| (.+?) \| .+ \|$",
        (DOCS / "decisions" / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [row[2] for row in rows] == [page.name for page in DECISIONS]
    for (number, title, _, status), page in zip(rows, DECISIONS, strict=True):
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {number}: {title}\n\nStatus: {status}"), page.name
        assert STATUS.fullmatch(status), status
        for other in re.findall(r"\d{3}", status):
            assert any(decision.name.startswith(other) for decision in DECISIONS), f"{page.name}: {other}"


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "mkdocstrings")),
    reason="MkDocs is not installed (make docs)",
)
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "compile_plan" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
