"""Fusion groups around batch normalisation, ReLU and concatenation, and how a kernel recognises its group."""
