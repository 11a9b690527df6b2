"""What each backend does well: measured, then written down once.

The rows come from `benchmarks/bench_collectives.py` (times) and from `tests/test_backend.py`
(abilities, tried on two ranks). A group reads its row when it is made, and never chooses again.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen


@frozen
class Backend:
    """What a process-group backend can do by itself, and what we compose instead."""

    name: str
    reduces_mean: bool  # ReduceOp.AVG works
    composes_from_peers: bool  # an exchange between every two ranks beats its own collectives
    reason: str  # why, in one line, for whoever asks a group


BACKENDS: Final = {
    "solo": Backend(
        name="solo",
        reduces_mean=True,
        composes_from_peers=False,
        reason="one rank: nothing travels",
    ),
    "gloo": Backend(
        name="gloo",
        reduces_mean=True,
        composes_from_peers=True,
        reason=(
            "gloo's reduce-scatter moves as much as two all-reduces and its all-gather copies "
            "twice; exchanges between every two ranks were 3 to 12 times faster at 100 MB"
        ),
    ),
    "nccl": Backend(
        name="nccl",
        reduces_mean=True,
        composes_from_peers=False,
        reason="NCCL's own collectives are the fastest on its links",
    ),
}
