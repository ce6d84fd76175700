"""Batch normalisation: statistics, normalisation, the reductions and gradients of its backward pass; biases."""
