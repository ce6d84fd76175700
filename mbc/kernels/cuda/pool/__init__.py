"""Pooling, local response normalisation and upsampling, and fusion groups with a maximum pool at one end."""
