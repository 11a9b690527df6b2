"""residence."""
