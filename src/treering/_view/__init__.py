"""Records shown to people: text and terminal output. Never touches a store."""
