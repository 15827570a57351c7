"""Benchmarks: load on an engine or a server, output checks, scores, step costs, tuning."""
