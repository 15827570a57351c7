"""The catalog of pairs: those that the package ships, and those of the user."""

from peagle.catalog.catalog import DEFAULT_PAIR, all_pairs, find_pair, pair_names

__all__ = ["DEFAULT_PAIR", "all_pairs", "find_pair", "pair_names"]
