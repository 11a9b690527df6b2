"""What a unit's parameters cost this rank right now, and the legal moves."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class ShardState(Enum):
    """A unit whose parameters are replicated is always UNSHARDED."""

    SHARDED = auto()  # its shard only; parameters read as NaN
    GATHERING = auto()  # shard and full buffer; contents undefined until the handle is waited on
    UNSHARDED = auto()  # shard and full buffer; readable


NEXT: Final = {
    # straight to UNSHARDED when its slot still holds its current values; back from GATHERING when
    # a gather that was launched ahead turns out not to be needed
    ShardState.SHARDED: {ShardState.GATHERING, ShardState.UNSHARDED},
    ShardState.GATHERING: {ShardState.UNSHARDED, ShardState.SHARDED},
    ShardState.UNSHARDED: {ShardState.SHARDED},
}
