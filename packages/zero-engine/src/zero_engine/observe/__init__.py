"""What training does on the user's own model."""

from .timeline import Event, Timeline

__all__ = ["Event", "Timeline"]
