"""Shards at a home, in memory for as long as they are stepped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field
from torch import Tensor, nn

from ._flat_buffer import FlatBuffer
from ._rest import AtHome
from ._shard_home import AbstractShardHome


@define(eq=False)
class OpenShards:
    """Opens them as their targets come, and closes those whose targets come no more.

    Args:
        buffer_of: By target.
        is_overwritten: Whether every element of a buffer's shard is going to be written.
    """

    buffer_of: Mapping[nn.Parameter, FlatBuffer]
    is_overwritten: Callable[[FlatBuffer], bool]
    _open: dict[int, FlatBuffer] = field(factory=dict, init=False)

    def open(self, targets: Sequence[nn.Parameter]) -> None:
        """These are written next. Blocks where values are read; with none, until all are kept."""
        wanted = {
            buffer.index: buffer
            for buffer in (self.buffer_of[target] for target in targets)
            if isinstance(buffer.resting, AtHome)
        }
        for index in self._open.keys() - wanted.keys():
            self._close(index)
        for index, buffer in wanted.items():
            if index not in self._open:
                assert isinstance(buffer.resting, AtHome), "chosen above"
                reads = not self.is_overwritten(buffer)
                shard = buffer.resting.home.open(index, reads=reads)
                if not reads:
                    _clear_padding(buffer, shard)
                buffer.point_targets(shard)
                self._open[index] = buffer
        for home in self._homes() if not targets else ():
            home.settle()

    def abandon(self) -> None:
        """Close all after an error, whatever it raises."""
        for index in list(self._open):
            with contextlib.suppress(Exception):
                self._close(index)
        for home in self._homes():
            with contextlib.suppress(Exception):
                home.settle()

    def _close(self, index: int) -> None:
        buffer = self._open.pop(index)
        assert isinstance(buffer.resting, AtHome), "opened above"
        try:
            buffer.resting.home.close(index)
        finally:
            buffer.point_targets(None)

    def _homes(self) -> set[AbstractShardHome]:
        resting = (buffer.resting for buffer in self.buffer_of.values())
        return {rest.home for rest in resting if isinstance(rest, AtHome)}


def _clear_padding(buffer: FlatBuffer, shard: Tensor) -> None:
    """What no parameter is written to must not be what the memory held before."""
    stop = 0
    for piece in sorted(buffer.pieces, key=lambda piece: piece.in_shard.start):
        shard[stop : piece.in_shard.start].zero_()
        stop = piece.in_shard.stop
    shard[stop:].zero_()
