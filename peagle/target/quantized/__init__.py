"""Quantized targets in the compressed-tensors layout of vLLM: formats, writing, reading."""
