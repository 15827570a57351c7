"""What `peagle bench` measured, to look at and to compare: a page, a Markdown table, a regression check."""
