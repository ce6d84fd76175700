"""Elementwise kernels, losses, ReLU bit masks, dropout, and changes of layout and type."""
