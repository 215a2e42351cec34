"""What lies in a file, read from its headers alone."""
