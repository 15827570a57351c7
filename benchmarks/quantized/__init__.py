"""Quantized targets and drafters."""
