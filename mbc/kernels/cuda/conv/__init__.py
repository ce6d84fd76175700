"""Convolutions: 1x1, weight-stationary, stem, transposed, depthwise and direct; linear layers of any type."""
