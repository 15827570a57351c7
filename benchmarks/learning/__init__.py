"""Learning from answers."""
