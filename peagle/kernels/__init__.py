"""Triton kernels, each beside its plain PyTorch reference."""
