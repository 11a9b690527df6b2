"""What hangs on the user's module belongs to it, and to this rank."""

from __future__ import annotations

from typing import NoReturn

from ._guards import refuse_deepcopy, refuse_pickle


class Bound:
    """A hook belongs to one model on one rank: copying or pickling it would share our buffers."""

    def __deepcopy__(self, memo: dict) -> NoReturn:
        refuse_deepcopy()

    def __reduce__(self) -> NoReturn:
        refuse_pickle()
