"""Measurements people decide by."""

FORMAT = "peagle-bench/1"  # of a result file: written here, read by peagle.report
