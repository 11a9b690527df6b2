"""The two seeds of a rank whose layers are split over a group: Megatron's, to compare runs by."""

from __future__ import annotations

from typing import Final

from ._generators import seeded_state, set_state
from ._tracker import MODEL_PARALLEL_RNG, RngTracker, seed_of

_OFFSET: Final = 2718


def seed_both(tracker: RngTracker, seed: int, rank: int) -> None:
    """The tracker's device's default rng, and in place of all others the model-parallel one."""
    where = "model_parallel_cuda_manual_seed()"
    default, own = seed_of(where, seed), _own_seed(where, seed, rank)
    tracker.reset()
    tracker.add(MODEL_PARALLEL_RNG, own)
    set_state(tracker.device, seeded_state(tracker.device, default))


def reseed_own(tracker: RngTracker, seed: int, rank: int) -> None:
    """The model-parallel rng alone."""
    own = _own_seed("model_parallel_reconfigure_tp_seed()", seed, rank)
    tracker.reseed(MODEL_PARALLEL_RNG, own)


def _own_seed(where: str, seed: int, rank: int) -> int:
    return seed_of(where, seed_of(where, seed) + _OFFSET + rank)
