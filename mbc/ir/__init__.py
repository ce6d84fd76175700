"""Graphs of operations: a network as it is written, and the training step that is made of it (`graph`, `training`)."""
