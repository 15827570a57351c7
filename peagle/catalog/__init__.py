"""The known pairs: what ships with the package and what the user added."""

from peagle.catalog.catalog import DEFAULT_PAIR, catalog, find, names

__all__ = ["DEFAULT_PAIR", "catalog", "find", "names"]
