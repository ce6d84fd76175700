"""What an editor shows of a source: mistakes, shapes, times, completions, definitions. `mbc lsp` serves it.

* `scan`: words, declarations and bindings of a text, also of one that does not parse
* `analysis`: mistakes of a text, and the networks that it expands to
* `complete`: what may be written at a place
* `hover`: what a line and a word of it are
* `line_times`: predicted times of lines, planned in a process of its own
* `server`: the language server, by pygls
"""
