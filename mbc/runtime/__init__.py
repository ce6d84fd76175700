"""A package in use: `module` is what a user holds; `cuda` runs its plan on a GPU, `cpu` interprets it with NumPy."""
