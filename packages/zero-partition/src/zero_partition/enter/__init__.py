"""enter."""
