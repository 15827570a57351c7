"""Whether the measured answers are right: identical to those without drafts, and correct."""
