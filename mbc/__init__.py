"""mbc: an ahead-of-time compiler for training convolutional networks under a hard GPU memory budget."""

__version__ = "0.1.0"
