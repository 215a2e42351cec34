"""One module for each operation; each reads like a recipe."""
