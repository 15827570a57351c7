"""The cost of a million tokens, from measured cells and the price of an hour."""
