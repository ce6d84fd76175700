"""grammar/LANGUAGE.md is true: its examples compile, and its tables are those of the code.

`pytest tests/frontend --update-expected` writes the tables anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from mbc.frontend.functions import FUNCTION_HELP, FUNCTIONS
from mbc.frontend.sections import ENTRIES, OPTIMIZERS
from mbc.ir.types import Precision
from mbc.ops import LAYERS
from mbc.ops.base import Parameter, Setting
from mbc.passes.check_graph import verify_network
from tests.frontend.reading import ROOT, lower_text

PAGE = ROOT / "grammar" / "LANGUAGE.md"
EXAMPLES = re.findall(r"^```mbc\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _text(setting: Setting) -> str:
    if isinstance(setting, bool):
        return "true" if setting else "false"
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


def _settings(parameters: Sequence[Parameter]) -> str:
    shown: list[str] = []
    for p in parameters:
        kind = {"int": "", "float": "", "bool": "", "word": ""}.get(p.kind, f" ({p.kind})")
        shown.append(f"`{p.name}`{kind}" if p.default is None else f"`{p.name} = {_text(p.default)}`{kind}")
    return ", ".join(shown) or "none"


def _operations() -> str:
    rows = ["| operation | tensors | settings | meaning |", "| --- | --- | --- | --- |"]
    for name in sorted(LAYERS):
        layer = LAYERS[name]
        least, most = layer.inputs
        tensors = f"{least}" if least == most else f"{least} or more" if most is None else f"{least} to {most}"
        help_text = layer.help.replace("|", "\\|")
        rows.append(f"| `{name}` | {tensors} | {_settings(layer.parameters)} | {help_text} |")
    return "\n".join(rows)


def _optimizers() -> str:
    rows = ["| optimizer | settings |", "| --- | --- |"]
    rows += [f"| `{name}` | {_settings(parameters)} |" for name, parameters in OPTIMIZERS.items()]
    return "\n".join(rows)


def _functions() -> str:
    rows = ["| function | meaning |", "| --- | --- |"]
    return "\n".join(rows + [f"| `{name}` | {FUNCTION_HELP[name]} |" for name in FUNCTIONS])


@pytest.mark.parametrize(
    ("table", "content"), [("operations", _operations), ("optimizers", _optimizers), ("functions", _functions)]
)
def test_tables(table: str, content, update_expected: bool):
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {table} -->\n).*?(<!-- end -->)", re.DOTALL)
    expected = pattern.sub(lambda m: f"{m[1]}{content()}\n{m[2]}", text)
    if update_expected:
        PAGE.write_text(expected, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("example", EXAMPLES, ids=[re.findall(r"network (\w+)", e)[0] for e in EXAMPLES])
def test_examples_compile(example: str):
    verify_network(lower_text(example).network)


def test_entries_and_words_are_named():
    text = PAGE.read_text(encoding="utf-8")
    for section, entries in ENTRIES.items():
        for entry in entries:
            assert f"| `{section}.{entry}` |" in text
    words = {word for layer in LAYERS.values() for p in layer.parameters for word in p.words}
    for word in words | {p.value for p in Precision}:
        assert f"`{word}`" in text
