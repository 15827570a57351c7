"""Measurements people decide by."""
