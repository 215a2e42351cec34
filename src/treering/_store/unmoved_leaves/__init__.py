"""Leaves directories where nothing is renamed: the files of a save stay in the folder of its attempt."""
