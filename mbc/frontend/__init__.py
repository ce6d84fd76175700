"""Source text -> syntax tree -> Network: `parse`, then `lower`. grammar/LANGUAGE.md teaches the language.

* `parse`: source text -> syntax tree, by Lark
* `tree`: Lark's tree -> the syntax tree of `ast`
* `ast`: the syntax tree: the source as written, with its places
* `syntax`: errors of syntax, in plain words
* `positions`: offsets -> lines and columns
* `lower`: syntax tree -> network, with the settings of the command line
* `statements`: statements: a network's body is run once
* `evaluate`: the values of expressions in a frame
* `operators`: operators on numbers, tensors and losses
* `functions`: functions of the language
* `values`: the values of expressions
* `names`: scopes, in which paths of layers are claimed
* `frame`: names and the values to which they are bound
* `building`: a network under construction, and limits of sizes
* `scalars`: the operands of `loss` and `metric`
* `settings`: settings in parentheses -> values by name
* `sections`: `train { ... }` and `memory { ... }`
* `parameter_entries`: entries that name parameters by patterns
* `unknown`: errors of unknown names
* `format`: the formatter of sources
* `near`: the known name that was probably meant
* `pytorch`: PyTorch's names, and their equivalents in mbc
"""
