"""The language server: it answers an editor's requests of the Language Server Protocol over stdin and stdout."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import cast

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.workspace import ServerTextPosition, ServerTextRange, TextDocument

from mbc.editor.analysis import Analysis, analyse
from mbc.editor.complete import Offer, complete
from mbc.editor.hover import line_text, word_text
from mbc.editor.line_times import LineTimes, Planner
from mbc.editor.scan import definition, scan
from mbc.errors import MbcError
from mbc.frontend.format import format_source
from mbc.source import Source, visible
from mbc.version import __version__

KINDS = {
    "operation": types.CompletionItemKind.Function,
    "block": types.CompletionItemKind.Class,
    "function": types.CompletionItemKind.Function,
    "setting": types.CompletionItemKind.Property,
    "entry": types.CompletionItemKind.Property,
    "word": types.CompletionItemKind.Keyword,
    "value": types.CompletionItemKind.EnumMember,
}  # all others are variables
TRIGGERS = [">", "(", ",", "=", ":", ".", "{"]


class Server(LanguageServer):
    """A language server.

    `gpu` is the GPU of predicted times, unless the editor's `initializationOptions` name another.
    """

    def __init__(self, gpu: str) -> None:
        """Predict times for `gpu`."""
        super().__init__("mbc", __version__)  # pyright: ignore[reportUnknownMemberType]
        self.planner = Planner(gpu, self._planned)
        self._lock = threading.Lock()  # one analysis at a time: most ask for the text that was just analysed

    def document(self, asked: types.TextDocumentIdentifier) -> TextDocument:
        """Return a document of the workspace."""
        return self.workspace.get_text_document(asked.uri)

    def analysis(self, document: TextDocument) -> Analysis:
        """Return the analysis of a document."""
        with self._lock:
            return analyse(Source(document.filename or document.uri, document.source))

    def check(self, document: TextDocument, version: int | None, plan: bool) -> None:
        """Publish the mistakes of a version of a document, unless it has changed; `plan`: predict its times as well."""
        if document.version != version:
            return
        analysis = self.analysis(document)
        if document.version == version:
            self._publish(document, analysis.errors)
            if plan and analysis.networks:
                self.planner.times(analysis.source.text)

    def _publish(self, document: TextDocument, errors: tuple[MbcError, ...]) -> None:
        diagnostics = [_diagnostic(document, error) for error in errors]
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, diagnostics, document.version)
        )

    def _planned(self, text: str, times: LineTimes) -> None:
        """Publish the error of a source without a plan, such as a budget that is too small."""
        for document in list(self.workspace.text_documents.values()):
            if times.code and document.source == text:
                self._publish(document, (MbcError(times.code, times.error, times.remedy),))


def _diagnostic(document: TextDocument, error: MbcError) -> types.Diagnostic:
    message = f"{error.message}\nhelp: {error.remedy}" if error.remedy else error.message
    place = range_of(document, error)
    return types.Diagnostic(place, visible(message), types.DiagnosticSeverity.Error, error.code, source="mbc")


def range_of(document: TextDocument, error: MbcError) -> types.Range:
    """Return the place of an error; errors of planning are shown at the budget, or at the start."""
    if error.span is not None and error.span.source.text == document.source:
        line, column = error.span.line - 1, error.span.column - 1
        start, end = ServerTextPosition(line, column), ServerTextPosition(line, column + error.span.length)
        return document.range_to_client_units(ServerTextRange(start, end))
    start = next((d.start for d in scan(document.source).declarations if d.kind == "memory"), 0)
    return _range(document, start, start + len("memory") * bool(start))


def _range(document: TextDocument, start: int, end: int) -> types.Range:
    before = [document.source[:offset] for offset in (start, end)]
    places = [ServerTextPosition(text.count("\n"), len(text) - text.rfind("\n") - 1) for text in before]
    return document.range_to_client_units(ServerTextRange(*places))


def make_server(gpu: str) -> Server:
    """Return a server with all its features; its `start_io` serves until the editor ends it."""
    server = Server(gpu)
    _add_checks(server)
    _add_answers(server)
    return server


def _option(options: object, name: str) -> object:
    """Return an option that a client sent in a mapping, or in an object built from one."""
    if isinstance(options, Mapping):
        return cast(Mapping[str, object], options).get(name)
    return getattr(options, name, None)


def _add_checks(server: Server) -> None:
    """Register the checks that run when a document changes."""

    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:  # pyright: ignore[reportUnusedFunction]
        server.planner.gpu = str(_option(params.initialization_options, "gpu") or server.planner.gpu)

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    @server.thread()
    def opened(params: types.DidOpenTextDocumentParams) -> None:  # pyright: ignore[reportUnusedFunction]
        document = server.workspace.get_text_document(params.text_document.uri)
        server.check(document, document.version, plan=True)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    @server.thread()
    def changed(params: types.DidChangeTextDocumentParams) -> None:  # pyright: ignore[reportUnusedFunction]
        server.check(server.workspace.get_text_document(params.text_document.uri), params.text_document.version, False)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    @server.thread()
    def saved(params: types.DidSaveTextDocumentParams) -> None:  # pyright: ignore[reportUnusedFunction]
        document = server.document(params.text_document)
        server.check(document, document.version, plan=True)


def _add_answers(server: Server) -> None:
    """Register the answers to requests of an editor."""

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    @server.thread()
    def hover(params: types.HoverParams) -> types.Hover | None:  # pyright: ignore[reportUnusedFunction]
        document = server.document(params.text_document)
        analysis = server.analysis(document)
        text = analysis.source.text
        times = server.planner.times(text) if analysis.networks else None
        parts = [word_text(text, document.offset_at_position(params.position))]
        parts.append(line_text(analysis.networks, params.position.line + 1, times))
        shown = "\n\n---\n\n".join(part for part in parts if part)
        return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, shown)) if shown else None

    @server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=TRIGGERS))
    @server.thread()
    def completion(params: types.CompletionParams) -> list[types.CompletionItem]:  # pyright: ignore[reportUnusedFunction]
        document = server.document(params.text_document)
        return [_item(offer) for offer in complete(document.source, document.offset_at_position(params.position))]

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    @server.thread()
    def define(params: types.DefinitionParams) -> types.Location | None:  # pyright: ignore[reportUnusedFunction]
        document = server.document(params.text_document)
        word = definition(document.source, document.offset_at_position(params.position))
        return None if word is None else types.Location(document.uri, _range(document, word.start, word.end))

    @server.feature(types.TEXT_DOCUMENT_FORMATTING)
    @server.thread()
    def layout(params: types.DocumentFormattingParams) -> list[types.TextEdit]:  # pyright: ignore[reportUnusedFunction]
        document = server.document(params.text_document)
        text = document.source
        try:
            formatted = format_source(Source(document.filename or document.uri, text))
        except MbcError:
            return []  # the error is published already
        whole = types.Range(types.Position(0, 0), types.Position(len(document.lines) + 1, 0))
        return [] if formatted == text.replace("\r\n", "\n") else [types.TextEdit(whole, formatted)]


def _item(offer: Offer) -> types.CompletionItem:
    return types.CompletionItem(
        offer.label,
        kind=KINDS.get(offer.kind, types.CompletionItemKind.Variable),
        detail=offer.detail or offer.kind,
        documentation=offer.help or None,
    )
