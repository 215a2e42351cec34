"""What Sphinx does for these pages beyond its own: lists, reference, Markdown twins, redirects, a check of links."""
