"""`peagle serve`: load, start, failures and tool calls."""
