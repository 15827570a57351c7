"""The engine in process."""
