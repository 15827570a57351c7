"""The tool formats: one file each, and what they share: JSON as it arrives, grammars, ids."""
