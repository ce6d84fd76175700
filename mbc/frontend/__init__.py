"""Source text -> syntax tree -> Network: `parse`, then `lower`. grammar/LANGUAGE.md teaches the language.

* `parse`: source text -> syntax tree, by Lark
* `tree`: Lark's tree -> the syntax tree of `ast`
* `ast`: the syntax tree: what was written, with its places
* `syntax`: what is wrong with the syntax, in plain words
* `place`: offsets -> lines and columns
* `lower`: syntax tree -> network, with the settings of the command line
* `expand`: statements: a network's body is run once
* `evaluate`: what an expression is worth in a frame
* `arithmetic`: operators on numbers, tensors and losses
* `functions`: functions of the language
* `values`: what an expression can be worth
* `names`: scopes, in which paths of layers are claimed
* `frame`: which names are bound where
* `building`: a network in the making, and limits of sizes
* `scalars`: what losses and metrics are made of
* `settings`: settings in parentheses -> values by name
* `sections`: `train { ... }` and `memory { ... }`
* `groups`: entries that name parameters by patterns
* `unknown`: errors of names that are not known
* `format`: a source in its one layout
* `near`: the known name that was probably meant
* `pytorch`: PyTorch's names, and what mbc has in their place
"""
