"""Observation of a training: timelines, metrics, and verification against DDP.

All three take the user's own model and loop. `timeline` (timeline.py) records when each rank
computed, communicated and waited, from the ranges of `zero_comm.ranges`. `metrics` (metrics.py)
writes one row of numbers per training step: times, bytes sent, memory. `verify` (verify.py) trains
a model under DistributedDataParallel and under a configuration, side by side, and names the first
difference and its likely cause.

They read reports and events of the packages below, and install no hooks of their own in the
model. What must never happen: an observed training gives other numbers than the same one
unobserved.
"""

from .timeline import Event, Timeline

__all__ = ["Event", "Timeline"]
