"""Exchanges in which ranks read their parts out of each other's buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from zero_comm.handle import Handle
from zero_comm.messages import Messages, offset_of
from zero_comm.reduction import Reduction, finish_mean
from zero_comm.watch import Launch

from .peer_memory import PeerMemory, RemoteBuffer

# A piece of this size stays in cache until it is added.
_READ_BYTES: Final = 2**18

T = TypeVar("T")


@frozen(eq=False)
class Reads(Messages):
    """Exchanges of ranks that read each other's memory."""

    memory: PeerMemory
    reads_peers: ClassVar[bool] = True

    def exchange(
        self,
        buffer: Tensor,
        result: T,
        *,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        offsets: Sequence[int],
        launch: Launch,
    ) -> Handle[T]:
        """See `Messages`."""
        # Control traffic goes by messages: one reaches its peer even if this rank ends before.
        if launch.operation == "agree":
            return super().exchange(
                buffer, result, sends=sends, receives=receives, offsets=offsets, launch=launch
            )
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

        def carry_out(buffers: dict[int, RemoteBuffer]) -> None:
            for peer in others if receives else ():
                buffers[peer].read_into(receives[peer], offset=offsets[peer])

        return self._transfer(buffer, result, carry_out, launch)

    def reduce_scatter(
        self,
        buffer: Tensor,
        chunks: Sequence[Tensor],
        *,
        op: Reduction,
        out: Tensor,
        launch: Launch,
    ) -> Handle[Tensor]:
        """See `Messages`."""
        # `carry_out` must not refer to `self`, which refers to the process group. The group refers
        # to its PeerMemory, which refers to `carry_out` if ranks have diverged: the cycle would
        # never be freed.
        rank, world_size, own = self.rank, self.world_size, chunks[self.rank]
        item_bytes, offset = buffer.element_size(), offset_of(own, buffer)
        size = min(own.numel(), _READ_BYTES // item_bytes)

        def carry_out(buffers: dict[int, RemoteBuffer]) -> None:
            # The two rows alternate: one has the partial sum, the other the values to add.
            scratch = own.new_empty(2, size)
            for first in range(0, own.numel(), max(1, size)):
                piece = slice(first, min(first + size, own.numel()))
                total = own
                for other in range(world_size):
                    row = target = scratch[other % 2, : piece.stop - first]
                    if other == rank:
                        row = own[piece]
                    else:
                        buffers[other].read_into(row, offset=offset + first * item_bytes)
                    # Only the last sum goes to `out`, which may be `own` and is read before.
                    if other == world_size - 1:
                        target = out[piece]
                    total = row if other == 0 else torch.add(total, row, out=target)
                finish_mean(total, op=op, world_size=world_size)

        return self._transfer(buffer, out, carry_out, launch)

    def _transfer(
        self,
        buffer: Tensor,
        result: T,
        carry_out: Callable[[dict[int, RemoteBuffer]], None],
        launch: Launch,
    ) -> Handle[T]:
        transfer = self.memory.launch(launch.key, buffer, carry_out, launch=launch)
        launch.watch.sent()

        def finish(timeout_s: float | None) -> T:
            self.memory.wait(transfer, launch.operation, timeout_s=timeout_s)
            return result

        return Handle(finish)
