"""What hangs on the user's module belongs to it, and to this rank."""

from __future__ import annotations

from typing import NoReturn

from ._errors import StateError


class Bound:
    """A hook belongs to one model on one rank: copying or pickling it would share our buffers."""

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise StateError(
            "copy.deepcopy() of a sharded model: its parameters live in buffers that are shared "
            "with the optimizer and with other ranks. Build a fresh model and load "
            "zero_engine.full_state_dict(model) into it, or copy before shard()."
        )

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "pickling a sharded model: save zero_engine.full_state_dict(model) instead"
        )
