"""Errors of running a function a second time, one type per remedy."""


class CheckpointError(RuntimeError):
    """A checkpoint was misused, or configured in contradiction."""


class NondeterminismError(CheckpointError):
    """The second run of a function did not do what the first one did."""


class SeedInUseError(CheckpointError):
    """A name or a seed of a tracker was given twice, which would give equal random numbers."""


class UnknownRngError(CheckpointError):
    """A tracker was asked for an rng that was not added."""
