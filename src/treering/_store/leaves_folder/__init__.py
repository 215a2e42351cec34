"""The folder of a leaves directory: staged files, the commit, and reading while a save is under way."""
