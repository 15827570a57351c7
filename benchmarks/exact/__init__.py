"""Exact mode: the bits and times of its kernels, its answers and its price."""
