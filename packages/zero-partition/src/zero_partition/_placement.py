"""The ZeRO table (arXiv 1910.02054, section 5): a stage is a row of placements."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

from attrs import frozen


class Placement(Enum):
    """Where a kind of tensor rests between uses."""

    REPLICATED = "replicated"  # every rank holds all of it
    SHARDED = "sharded"  # every rank holds 1 / world_size of it


class Stage(IntEnum):
    """The names the paper gave to three placements; zero is plain data parallelism."""

    ZERO = 0
    ONE = 1
    TWO = 2
    THREE = 3


@frozen
class Placements:
    """What each rank keeps at rest."""

    params: Placement
    grads: Placement
    optim: Placement


REPLICATED, SHARDED = Placement
STAGES: Final = {
    Stage.ZERO: Placements(params=REPLICATED, grads=REPLICATED, optim=REPLICATED),
    Stage.ONE: Placements(params=REPLICATED, grads=REPLICATED, optim=SHARDED),
    Stage.TWO: Placements(params=REPLICATED, grads=SHARDED, optim=SHARDED),
    Stage.THREE: Placements(params=SHARDED, grads=SHARDED, optim=SHARDED),
}
