"""Timelines, metrics and verification of training on the user's own model."""

from .timeline import Event, Timeline

__all__ = ["Event", "Timeline"]
