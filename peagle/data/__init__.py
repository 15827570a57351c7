"""Records on disk: JSON lines, prompts, conversations, benchmark sets."""
