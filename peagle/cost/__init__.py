"""What a million tokens cost: from measured cells, or numbers given by hand, and the price of an hour."""
