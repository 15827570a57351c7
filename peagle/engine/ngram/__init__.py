"""N-gram drafts (prompt lookup): the continuation of an earlier occurrence of the last tokens."""
