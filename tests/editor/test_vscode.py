"""The VS Code extension of docs/vscode: its grammar is that of the language, and its parts fit together.

`pytest tests/editor --update-expected` writes the grammar anew.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mbc.editor.scan import KEYWORDS
from mbc.frontend.parse import parse_tokens
from mbc.source import Source
from mbc.version import __version__
from tests.editor.textmate import CONSTANTS, grammar, keywords, scopes
from tests.frontend.reading import ROOT

EXTENSION = ROOT / "docs" / "vscode"
GRAMMAR = EXTENSION / "syntaxes" / "mbc.tmLanguage.json"
# Tokens of the Lark grammar whose scope does not depend on what they are called.
SCOPES = {"NUMBER": "constant.numeric.mbc", "SIZE": "constant.numeric.size.mbc", "STRING": "string.quoted.double.mbc",
          "LABEL": "entity.name.label.mbc", "TRUE": "constant.language.mbc", "COMPARE": "keyword.operator.mbc",
          "SIGN": "keyword.operator.mbc", "TIMES": "keyword.operator.mbc", "POWER": "keyword.operator.mbc",
          "FOR": "keyword.control.mbc", "INPUT": "keyword.control.mbc", "WHEN": "keyword.control.mbc"}  # fmt: skip


def _json(name: str) -> Any:
    return json.loads((EXTENSION / name).read_text(encoding="utf-8"))


def test_the_grammar_is_written_from_that_of_the_language(update_expected: bool):
    if update_expected:
        GRAMMAR.write_text(grammar(), encoding="utf-8")
    assert GRAMMAR.read_text(encoding="utf-8") == grammar()


def test_every_keyword_has_its_scope():
    assert set(keywords()) == KEYWORDS
    for word in keywords():
        scope = "constant.language.mbc" if word in CONSTANTS else "keyword.control.mbc"
        assert scopes(_json("syntaxes/mbc.tmLanguage.json"), f"({word})") == [(word, scope)]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.mbc")), ids=lambda path: path.stem)
def test_tokens_of_the_examples_have_their_scopes(path: Path):
    source = Source(path.name, path.read_text(encoding="utf-8"))
    document = _json("syntaxes/mbc.tmLanguage.json")
    line_scopes = [set(scopes(document, line)) for line in source.text.splitlines()]
    tokens = [token for token in parse_tokens(source).tokens if token.type in SCOPES]
    assert tokens
    for token in tokens:
        assert (token.value, SCOPES[token.type]) in line_scopes[(token.line or 0) - 1], token


def test_a_line():
    line = "y = x |> conv(8, 3, pad=1, init=he) |> own(2) @down.0  # a |> b"
    assert scopes(_json("syntaxes/mbc.tmLanguage.json"), line) == [
        ("=", "keyword.operator.mbc"),
        ("|>", "keyword.operator.mbc"),
        ("conv", "support.function.mbc"),
        ("8", "constant.numeric.mbc"),
        ("3", "constant.numeric.mbc"),
        ("pad", "variable.parameter.mbc"),
        ("=", "keyword.operator.mbc"),
        ("1", "constant.numeric.mbc"),
        ("init", "variable.parameter.mbc"),
        ("=", "keyword.operator.mbc"),
        ("he", "support.constant.mbc"),
        ("|>", "keyword.operator.mbc"),
        ("own", "entity.name.function.mbc"),
        ("2", "constant.numeric.mbc"),
        ("@down.0", "entity.name.label.mbc"),
        ("# a |> b", "comment.line.number-sign.mbc"),
    ]


def test_the_parts_of_the_extension_are_there():
    package = _json("package.json")
    contributes = package["contributes"]
    named = [package["main"], contributes["languages"][0]["configuration"], contributes["grammars"][0]["path"]]
    assert all((EXTENSION / name).is_file() for name in named)
    assert contributes["grammars"][0]["scopeName"] == _json("syntaxes/mbc.tmLanguage.json")["scopeName"]
    assert __version__.startswith(package["version"]), "the extension has the version of mbc"
    configuration = _json("language-configuration.json")
    assert configuration["comments"]["lineComment"] == "#"
    rules = configuration["indentationRules"]
    assert re.search(rules["increaseIndentPattern"], "network a {  # b")
    assert re.search(rules["decreaseIndentPattern"], "  }")
    script = (EXTENSION / "extension.js").read_text(encoding="utf-8")
    for name in contributes["configuration"]["properties"]:
        assert f'settings.get("{name.removeprefix("mbc.")}")' in script
    assert f'"{contributes["commands"][0]["command"]}"' in script
    assert contributes["configuration"]["properties"]["mbc.command"]["default"] == ["mbc", "lsp"]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_the_client_starts_and_stops_the_server(tmp_path: Path):
    """The extension runs against stand-ins for VS Code and its client library, which record its calls."""
    (tmp_path / "run.js").write_text(DRIVER.replace("EXTENSION", json.dumps(str(EXTENSION / "extension.js"))))
    done = subprocess.run(["node", "run.js"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        ["server", {"command": "/opt/mbc", "args": ["lsp"]}, {"gpu": "t4"}],
        ["start"],
        ["stop"],
        ["server", {"command": "/opt/mbc", "args": ["lsp"]}, {"gpu": "t4"}],
        ["start"],
        ["stop"],
    ]


DRIVER = """
const Module = require("module");
const said = [];
const registered = {};
class LanguageClient {
  constructor(id, name, server, client) { said.push(["server", server, client.initializationOptions]); }
  async start() { said.push(["start"]); }
  isRunning() { return true; }
  async stop() { said.push(["stop"]); }
}
const settings = { command: ["/opt/mbc", "lsp"], gpu: "t4" };
const vscode = {
  commands: { registerCommand: (name, run) => (registered[name] = run) },
  window: { showErrorMessage: (text) => said.push(["error", text]) },
  workspace: { getConfiguration: () => ({ get: (name) => settings[name] }), onDidChangeConfiguration: () => ({}) },
};
const load = Module._load;
Module._load = (name, ...rest) =>
  name === "vscode" ? vscode : name === "vscode-languageclient/node" ? { LanguageClient } : load(name, ...rest);
const extension = require(EXTENSION);
(async () => {
  await extension.activate({ subscriptions: [] });
  await registered["mbc.restart"]();
  await extension.deactivate();
  process.stdout.write(JSON.stringify(said));
})();
"""
