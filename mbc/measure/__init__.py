"""Measuring: which candidates of a request compute it correctly on a GPU, and how fast."""
