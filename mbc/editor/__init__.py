"""The language server behind `mbc lsp`: errors, shapes, times, completions and definitions of a source.

* `scan`: words, declarations and bindings of a text, also of one that does not parse
* `analysis`: errors of a text, and the networks that it expands to
* `complete`: completions at a position
* `hover`: facts on a line and on a word
* `line_times`: predicted times of lines, planned in a process of its own
* `server`: the language server, by pygls
"""
