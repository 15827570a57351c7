"""The catalog of pairs: those that the package ships, and those of the user."""

from peagle.catalog.catalog import DEFAULT_PAIR, catalog, find, names

__all__ = ["DEFAULT_PAIR", "catalog", "find", "names"]
