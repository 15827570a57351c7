"""Attention over paged keys and values, and the rotation of its rows."""
