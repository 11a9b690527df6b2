"""Exchanges between every two ranks of a group, by messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from .handle import Handle, Message, fail
from .reduction import Reduction, finish_mean
from .torch_private import is_profiled, unrecorded
from .watch import Launch

# Messages of this size let the local sum run while later messages arrive, and stay in cache for
# it. Between 512 KiB and 8 MiB the time hardly changes (benchmarks/run.py collectives).
_MESSAGE_BYTES: Final = 2 * 2**20

T = TypeVar("T")


@frozen(eq=False)
class Messages:
    """Exchanges of one rank with all others; collectives that backends do not have are made of it.

    Every method is collective and returns at once. Parts that are empty do not travel.
    """

    process_group: Any  # torch's ProcessGroup; None for a group of one
    rank: int
    world_size: int
    # Whether ranks read each other's memory in place of sending messages.
    reads_peers: ClassVar[bool] = False

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
        """Send each rank a part of `buffer`, and receive from each.

        Args:
            buffer: 1-D, contiguous; what `sends` are parts of.
            result: What the handle is of.
            sends: For each rank, what it is sent.
            receives: For each rank, what is filled with what it sends; may be empty where no rank
                sends this one anything.
            offsets: Where that lies in each rank's buffer, in bytes.
            launch: This collective.
        """
        # Each rank begins with the next one, so that not all of them send to one rank at a time.
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        received = [peer for peer in reversed(others) if receives and receives[peer].numel()]
        messages = [self._message(receives[peer], peer, launch) for peer in received]
        sent = [peer for peer in others if sends[peer].numel()]
        messages += [self._message(sends[peer], peer, launch, is_sent=True) for peer in sent]
        launch.watch.sent()
        return Handle(lambda _: result, messages, (buffer, result))

    def reduce_scatter(
        self,
        buffer: Tensor,
        chunks: Sequence[Tensor],
        *,
        op: Reduction,
        out: Tensor,
        launch: Launch,
    ) -> Handle[Tensor]:
        """Add this rank's chunk of every rank's buffer into `out`, which may be its own chunk.

        Args:
            buffer: 1-D, contiguous.
            chunks: All of it, cut by rank.
            op: Sum or mean.
            out: As many elements as this rank's chunk.
            launch: This collective.
        """
        own, world_size = chunks[self.rank], self.world_size
        peers = [rank for rank in range(world_size) if rank != self.rank]
        if len(peers) == 1 and out.data_ptr() != own.data_ptr():
            # Received values may go to `out`, as a sum of two does not depend on their order.
            scratch = {peers[0]: out}
        else:
            rows = own.new_empty(len(peers), own.numel())
            scratch = {peer: rows[i] for i, peer in enumerate(peers)}

        step = max(1, _MESSAGE_BYTES // buffer.element_size())
        arrivals: list[tuple[slice, list[Message]]] = []
        for start in range(0, own.numel(), step):
            piece = slice(start, min(start + step, own.numel()))
            messages = [self._message(scratch[peer][piece], peer, launch) for peer in peers]
            arrivals.append((piece, messages))
        sends = []
        for start in range(0, max(chunk.numel() for chunk in chunks), step):
            for peer in peers:
                part = chunks[peer][start : start + step]
                if part.numel():
                    sends.append(self._message(part, peer, launch, is_sent=True))
        launch.watch.sent()

        def finish(timeout_s: float | None) -> Tensor:
            for piece, messages in arrivals:
                for message in messages:
                    message.wait(timeout_s=timeout_s)
                rows = [
                    own[piece] if rank == self.rank else scratch[rank][piece]
                    for rank in range(world_size)
                ]
                # Partial sums go to scratch: `out` may be `own`, which is read in its turn.
                partial_sum = rows[0]
                for row in rows[1:-1]:
                    partial_sum = torch.add(partial_sum, row, out=scratch[peers[0]][piece])
                total = torch.add(partial_sum, rows[-1], out=out[piece])
                finish_mean(total, op=op, world_size=world_size)
            for message in sends:
                message.wait(timeout_s=timeout_s)
            return out

        received = [message for _, messages in arrivals for message in messages]
        return Handle(finish, (), (buffer, out, scratch), (*received, *sends))

    def _message(
        self, tensor: Tensor, peer: int, launch: Launch, *, is_sent: bool = False
    ) -> Message:
        what = f"{'sending to' if is_sent else 'receiving from'} rank {peer}"
        start: Any = dist.isend if is_sent else dist.irecv
        if is_profiled():
            start = partial(unrecorded, start)
        where = dist.get_global_rank(self.process_group, peer)
        try:
            work = start(tensor, where, group=self.process_group, tag=launch.key)
        except RuntimeError as error:
            # The connection is closed: peers need not be told that this launch was interrupted.
            launch.watch.sent()
            fail(f"{what} did not begin", error, launch, peer)
        return Message(work, what, launch, peer)


def offset_of(chunk: Tensor, buffer: Tensor) -> int:
    """Return where a part of a flat buffer lies in it, in bytes."""
    return int(chunk.storage_offset() - buffer.storage_offset()) * buffer.element_size()
