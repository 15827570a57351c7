"""Deployment of a pair: one spec (`spec.py`), rendered for each platform that can serve it."""
