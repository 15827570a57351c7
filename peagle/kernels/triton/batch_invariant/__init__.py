"""Kernels whose result for a row depends on that row alone, not on the batch around it."""
