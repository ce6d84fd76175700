"""Profiles: measured times of kernels in SQLite, looked up, interpolated between sizes, and kept up to date."""
