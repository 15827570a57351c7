"""Kernels on a GPU, and what they compile to."""
