"""Result files of `peagle bench`: bench writes these records; report, cost and CLI read them."""
