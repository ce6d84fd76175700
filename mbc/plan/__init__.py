"""A plan: what it says (`model`), its file, what is told from it alone. `verify` shares nothing with the search."""
