"""What `peagle bench` measured: a page with charts, a Markdown table, a regression check."""
