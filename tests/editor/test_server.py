"""`mbc lsp`, driven as an editor drives it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pygls", reason="pygls is not installed (pip install 'mbc-compiler[lsp]')")

from mbc.cli import main
from tests.editor.client import Client

SOURCE = """\
# ↦ 𝟙 beyond ASCII
block unit(c) on x { return x |> conv(c, 3, pad=1) |> relu }
network tiny(batch = 8, classes = 3) {
  input image[batch, 1, 6, 6] : float
  input target[batch] : class
  x = image |> unit(4)
  x = x |> unit(8)
  logits = x |> global_avgpool |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { precision = bf16 }
"""
URI = "file:///nowhere/tiny.mbc"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    server_client = Client("--gpu", "t4")
    asked = server_client.ask("initialize", {"processId": None, "rootUri": None, "capabilities": {},
                                    "initializationOptions": {"gpu": "h200"}})  # fmt: skip
    assert asked["capabilities"]["completionProvider"]["triggerCharacters"]
    server_client.tell("initialized", {})
    yield server_client
    assert server_client.end() == (0, "")


@pytest.fixture
def opened(client) -> Iterator[Client]:
    client.tell(
        "textDocument/didOpen", {"textDocument": {"uri": URI, "languageId": "mbc", "version": 1, "text": SOURCE}}
    )
    assert client.notification("textDocument/publishDiagnostics") == {"uri": URI, "version": 1, "diagnostics": []}
    yield client
    client.tell("textDocument/didClose", {"textDocument": {"uri": URI}})


def _at(line: int, character: int) -> dict[str, Any]:
    return {"textDocument": {"uri": URI}, "position": {"line": line, "character": character}}


def _changed(client: Client, text: str, version: int = 2) -> list[Any]:
    """Return the diagnostics for a changed text."""
    document = {"uri": URI, "version": version}
    client.tell("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})
    while (published := client.notification("textDocument/publishDiagnostics"))["version"] != version:
        pass
    return published["diagnostics"]


def test_mistakes_have_code_place_and_remedy(opened):
    (diagnostic,) = _changed(opened, SOURCE.replace("linear(", "lineaer("))
    assert diagnostic["code"] == "MBC006" and diagnostic["source"] == "mbc" and diagnostic["severity"] == 1
    assert diagnostic["message"] == "there is no operation or block `lineaer`\nhelp: did you mean `linear`?"
    assert diagnostic["range"] == {"start": {"line": 7, "character": 34}, "end": {"line": 7, "character": 41}}
    assert _changed(opened, SOURCE, 3) == []


def test_places_are_counted_as_the_protocol_does(opened):
    (diagnostic,) = _changed(opened, "network a {\n  𝟙 = 1\n}\n")
    assert diagnostic["range"] == {"start": {"line": 1, "character": 2}, "end": {"line": 1, "character": 4}}


def test_a_budget_that_is_too_small_is_a_mistake_at_the_budget(opened):
    text = SOURCE + "memory { device = 1 MB }\n"
    document = {"uri": URI, "version": 2}
    opened.tell("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})
    opened.tell("textDocument/didSave", {"textDocument": {"uri": URI}})
    while not (published := opened.notification("textDocument/publishDiagnostics"))["diagnostics"]:
        pass
    (diagnostic,) = published["diagnostics"]
    assert diagnostic["range"]["start"] == {"line": 12, "character": 0}
    assert (
        diagnostic["code"] == "MBC203" and "cannot fit" in diagnostic["message"] and "\nhelp: " in diagnostic["message"]
    )


def test_a_hover_tells_shapes_bytes_and_time(opened):
    deadline = time.monotonic() + 120
    while "being predicted" in (text := opened.ask("textDocument/hover", _at(1, 34))["contents"]["value"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "conv(channels, kernel, stride = 1" in text and "Convolution along" in text
    assert "| convolution | `bf16[8, 4, 6, 6]`, `bf16[8, 8, 6, 6]` | 6.75 KiB |" in text
    assert "forward and backward, predicted for NVIDIA H200" in text
    assert opened.ask("textDocument/hover", _at(10, 0)) is None


def test_definitions(opened):
    def defined(line: int, character: int) -> tuple[int, int]:
        start = opened.ask("textDocument/definition", _at(line, character))["range"]["start"]
        return start["line"], start["character"]

    assert defined(5, 16) == (1, 6)  # unit
    assert defined(6, 6) == (5, 2)  # x, as it was before
    assert defined(7, 43) == (2, 24)  # classes
    assert opened.ask("textDocument/definition", _at(0, 0)) is None


def test_completion(opened):
    text = SOURCE.replace("linear(classes) @head", "li")
    _changed(opened, text)
    completions = {item["label"]: item for item in opened.ask("textDocument/completion", _at(7, 36))}
    assert completions["linear"]["detail"].startswith("linear(features") and completions["unit"]["detail"] == "unit(c)"
    assert "network" not in completions


def test_layout(opened):
    options = {"textDocument": {"uri": URI}, "options": {"tabSize": 8, "insertSpaces": False}}
    assert opened.ask("textDocument/formatting", options) == []
    _changed(opened, SOURCE.replace("  x = ", "x="))
    (edit,) = opened.ask("textDocument/formatting", options)
    assert edit["newText"] == SOURCE and edit["range"]["start"] == {"line": 0, "character": 0}
    _changed(opened, SOURCE.replace("}", ""), 3)
    assert opened.ask("textDocument/formatting", options) == []


def test_a_document_that_nobody_opened_is_an_error_and_not_the_end(opened):
    opened.tell("textDocument/didSave", {"textDocument": {"uri": "file:///nowhere/else.mbc"}})
    assert opened.ask("textDocument/formatting", {**_at(0, 0), "options": {"tabSize": 2, "insertSpaces": True}}) == []


def test_an_unknown_gpu_is_reported_at_the_start(capsys):
    assert main(["lsp", "--gpu", "nosuch"]) == 1
    assert "error MBC070: unknown GPU 'nosuch'" in capsys.readouterr().err
