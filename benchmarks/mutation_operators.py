"""Places where a mutation campaign changes sources: Python by its syntax tree, CUDA by patterns outside comments.

Tools that are well kept do not fit: mutmut and cosmic-ray mutate Python alone, run one command for all mutants of a
whole package, and have to be installed on the machine of the campaign, which may have no network.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not",
    "not in": "in", "in": "not in",
}  # fmt: skip
CHOICES = {"min": "max", "max": "min", "any": "all", "all": "any"}
ARITHMETIC = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "//", "<<": ">>", ">>": "<<"}
BOOLEAN = {"and": "or", "or": "and"}
KINDS = ("comparison", "boolean", "arithmetic", "choice", "constant")
# Of CUDA: brackets of templates have no spaces around them, and operators have.
CUDA_PATTERNS: dict[str, dict[str, dict[str, str]]] = {
    "comparison": {r"(?<= )(<=|<|>=|>|==|!=)(?= )": {k: v for k, v in COMPARISONS.items() if not k.isalpha()}},
    "boolean": {r"(?<= )(&&|\|\|)(?= )": {"&&": "||", "||": "&&"}},
    "arithmetic": {r"(?<= )(\+|-|\*|/|%)(?= )": {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/"}},
    "choice": {r"\b(fminf|fmaxf|min|max)(?=\()": {"min": "max", "max": "min", "fminf": "fmaxf", "fmaxf": "fminf"}},
    "constant": {r"(?<![\w.\"])([0-9]|[1-9][0-9])(?![\w.\"])": {str(n): str(n + 1) for n in range(100)}},
}
CUDA_SKIPPED = re.compile(
    r"//[^\n]*|^\s*#[^\n]*|\"(?:[^\"\\\n]|\\.)*\"|\basm\b[^;]*;|\btemplate <[^\n]*|__launch_bounds__[^\n]*", re.M
)


@dataclass(frozen=True)
class Site:
    """A change: bytes `start` to `stop` of a file become `text`.

    Attributes:
        whole: The bytes of the expression that changes, so that a probe can tell whether it ran; empty for CUDA.
    """

    kind: str
    start: int
    stop: int
    text: str
    whole: tuple[int, int] = (0, 0)

    def applied(self, source: bytes) -> bytes:
        """Return the mutated source."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def probed(self, source: bytes, probe: str) -> bytes:
        """Return the mutated source, in which the expression `probe`, which is true, runs before what changed."""
        first, last = self.whole
        changed = self.applied(source)[first : last + len(self.text.encode()) - (self.stop - self.start)]
        return source[:first] + f"({probe} and (".encode() + changed + b"))" + source[last:]


class _Finder(ast.NodeVisitor):
    """Collects the sites of a Python source; annotations, decorators, assertions and f-strings are left alone."""

    def __init__(self, source: bytes) -> None:
        self.source, self.sites = source, list[Site]()
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def between(self, kind: str, whole: ast.expr, pair: tuple[ast.expr, ast.expr], table: dict[str, str]) -> None:
        """Add the change of the operator between two operands."""
        start, stop = self.span(pair[0])[1], self.span(pair[1])[0]
        words = sorted(table, key=len, reverse=True)
        pattern = "|".join(rf"\b{w}\b".replace(" ", r"\s+") if w.isalpha() or " " in w else re.escape(w) for w in words)
        code = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.source[start:stop])
        match = re.search(pattern.encode(), code)
        if match is not None:
            text = table[b" ".join(match[0].split()).decode()]
            self.sites.append(Site(kind, start + match.start(), start + match.end(), text, self.span(whole)))

    def visit_Compare(self, node: ast.Compare) -> None:
        self.between("comparison", node, (node.left, node.comparators[0]), COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.between("boolean", node, (node.values[0], node.values[1]), BOOLEAN)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operands = (node.left, node.right)
        texts = [n for n in operands if isinstance(n, ast.JoinedStr) or isinstance(getattr(n, "value", None), str)]
        if not texts and not isinstance(node.op, ast.Pow):
            self.between("arithmetic", node, (node.left, node.right), ARITHMETIC)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start = self.span(node)[0]
            self.sites.append(Site("boolean", start, start + 3, "", self.span(node)))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in CHOICES:
            self.sites.append(Site("choice", *self.span(node.func), CHOICES[node.func.id], self.span(node)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.sites.append(Site("constant", *self.span(node), str(not node.value), self.span(node)))
        elif isinstance(node.value, int):
            self.sites.append(Site("constant", *self.span(node), str(node.value + 1), self.span(node)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def left_alone(self, node: ast.AST) -> None:
        """Skip a part of the tree."""

    visit_Assert = visit_JoinedStr = visit_MatchValue = visit_MatchMapping = left_alone


def sites_of(path: Path) -> list[Site]:
    """Return all sites of a source, in order."""
    source = path.read_bytes()
    if path.suffix == ".py":
        finder = _Finder(source)
        finder.visit(ast.parse(source))
        return sorted(finder.sites, key=lambda site: (site.start, site.stop))
    return sorted(_cuda_sites(source.decode("latin-1")), key=lambda site: (site.start, site.stop))


def _cuda_sites(source: str) -> Iterator[Site]:
    """Yield the sites of a source that has a character for each of its bytes."""
    code = CUDA_SKIPPED.sub(lambda skipped: re.sub(r"[^\n]", "\0", skipped[0]), source)
    for kind, patterns in CUDA_PATTERNS.items():
        for pattern, table in patterns.items():
            for match in re.finditer(pattern, code):
                yield Site(kind, match.start(), match.end(), table[match[0]])
