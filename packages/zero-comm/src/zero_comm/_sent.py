"""What one rank sends of a flat buffer: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class Sent:
    """Elements that one operation on one buffer has this rank send."""

    payload_numel: int  # that carry data, summed over the peers they are sent to
    padding_numel: int


def sent_of(
    splits: Sequence[int],
    payload: Sequence[int] | None,
    *,
    rank: int,
    sends_own: bool,
    peers: Sequence[int] | None = None,
) -> Sent:
    """What an algorithm that sends each element once to each rank that needs it sends. Local.

    Args:
        splits: Elements per rank, in rank order.
        payload: Those of them that carry data; `splits` when None.
        rank: Whose.
        sends_own: Its own chunk to every peer, as in an all-gather; else every peer its chunk, as
            in a reduce-scatter. An all-reduce does both.
        peers: Count what goes to these other ranks only; to all of them when None.
    """
    payload = splits if payload is None else payload

    def total(chunks: Sequence[int]) -> int:
        if peers is None:
            return chunks[rank] * (len(chunks) - 1) if sends_own else sum(chunks) - chunks[rank]
        return chunks[rank] * len(peers) if sends_own else sum(chunks[peer] for peer in peers)

    return Sent(total(payload), total(splits) - total(payload))
