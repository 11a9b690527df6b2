"""Savers of inputs until backward: as they are, split over ranks, on the host, or in slots."""
