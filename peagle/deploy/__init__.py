"""A pair on its way to production: one spec (`spec.py`), rendered for each place it can run."""
