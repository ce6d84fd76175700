"""`mbc lsp` without its library."""

from __future__ import annotations

import sys

from mbc.cli import main


def test_missing_parts_are_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lsprotocol", None)
    monkeypatch.delitem(sys.modules, "mbc.editor.server", raising=False)
    assert main(["lsp"]) == 1
    error = capsys.readouterr().err
    assert "error MBC326: the language server needs lsprotocol, which is not installed" in error
    assert "help: pip install 'mbc-compiler[lsp]'" in error
