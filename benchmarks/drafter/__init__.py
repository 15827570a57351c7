"""Drafters: training, acceptance, formats and vocabularies."""
