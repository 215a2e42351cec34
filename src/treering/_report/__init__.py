"""The report: one page that shows what is at a path."""
