"""Other libraries' names on top of ours, for scripts that exist."""
