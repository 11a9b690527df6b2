"""Elements and bytes that a collective sends, inside a node and across nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from attrs import frozen

from zero_comm.codecs.codec import AbstractCodec

__all__ = ["Sent", "sent_by_levels", "sent_of"]


@frozen
class Sent:
    """Elements and bytes that were sent, summed over the peers they were sent to."""

    payload_numel: int = 0  # elements that carry data
    payload_bytes: int = 0
    padding_bytes: int = 0
    scale_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Return all bytes: of payload, padding and scales."""
        return self.payload_bytes + self.padding_bytes + self.scale_bytes

    def __add__(self, other: Sent) -> Sent:
        """Return the sum of both."""
        return Sent(
            self.payload_numel + other.payload_numel,
            self.payload_bytes + other.payload_bytes,
            self.padding_bytes + other.padding_bytes,
            self.scale_bytes + other.scale_bytes,
        )

    def __mul__(self, times: int) -> Sent:
        """Return `times` times as much."""
        return Sent(
            self.payload_numel * times,
            self.payload_bytes * times,
            self.padding_bytes * times,
            self.scale_bytes * times,
        )

    def __sub__(self, other: Sent) -> Sent:
        """Return the difference."""
        return self + other * -1


def sent_of(
    splits: Sequence[int],
    payload: Sequence[int] | None,
    *,
    rank: int,
    sends_own: bool,
    itemsize: int,
    codec: AbstractCodec | None = None,
    nodes: Sequence[int] = (),
) -> tuple[Sent, Sent]:
    """Return what a rank sends if each element goes once to each rank that needs it. Local.

    Args:
        splits: Elements per rank, in rank order.
        payload: Those of them that carry data; `splits` when None.
        rank: The rank that sends.
        sends_own: Send the own chunk to every peer, as in an all-gather; else send every peer its
            chunk, as in a reduce-scatter. An all-reduce does both.
        itemsize: Bytes of an element, where no codec says otherwise.
        codec: Codec of the chunks that are sent; they are sent as they are when None.
        nodes: Node of each rank; all are on one when empty.

    Returns:
        What is sent inside the rank's node, and across nodes.
    """
    payload = splits if payload is None else payload
    chunks = (tuple(splits), tuple(payload), tuple(nodes))
    return sent_flat(*chunks, rank, sends_own, itemsize, codec)


@lru_cache(maxsize=4096)
def sent_flat(  # noqa: PLR0917 (what `Group.count` keeps of a call is a tuple)
    splits: tuple[int, ...],
    payload: tuple[int, ...],
    nodes: tuple[int, ...],
    rank: int,
    sends_own: bool,
    itemsize: int,
    codec: AbstractCodec | None,
) -> tuple[Sent, Sent]:
    """Return the same as `sent_of`. Cached, so arguments are hashable."""
    levels: tuple[Counter[tuple[int, int]], ...] = (Counter(), Counter())
    for peer in range(len(splits)):
        if peer != rank:
            chunk = rank if sends_own else peer
            is_across = bool(nodes) and nodes[peer] != nodes[rank]
            levels[is_across][splits[chunk], payload[chunk]] += 1
    inside, across = (
        sum(
            (
                chunk_sent(*of, itemsize=itemsize, codec=codec) * times
                for of, times in level.items()
            ),
            Sent(),
        )
        for level in levels
    )
    return inside, across


def chunk_sent(numel: int, payload: int, *, itemsize: int, codec: AbstractCodec | None) -> Sent:
    """Count one sent chunk of `numel` elements, of which `payload` carry data."""
    if codec is None:
        return Sent(payload, payload * itemsize, (numel - payload) * itemsize)
    value_bytes, scale_bytes = codec.value_bytes(payload), codec.scale_bytes(numel)
    padding_bytes = codec.wire_bytes(numel) - value_bytes - scale_bytes
    return Sent(payload, value_bytes, padding_bytes, scale_bytes)


def sent_by_levels(
    splits: Sequence[int],
    payload: Sequence[int],
    *,
    rank: int,
    ranks_per_node: int,
    codec: AbstractCodec,
) -> tuple[Sent, Sent]:
    """Return what a rank sends in `reduce_scatter_by_levels`: in its node, and across. Local.

    Args:
        splits: Elements per rank, in rank order.
        payload: Those of them that carry data.
        rank: The rank that sends.
        ranks_per_node: Number of ranks, neighbours in rank order, that share a node.
        codec: Codec of the chunks that are sent.
    """
    numels, carried = (tuple((numel,) for numel in of) for of in (splits, payload))
    return sent_in_hops(numels, carried, rank, ranks_per_node, codec)


# Cached, since every step has the same reductions.
@lru_cache(maxsize=4096)
def sent_in_hops(
    numels: tuple[tuple[int, ...], ...],
    payload: tuple[tuple[int, ...], ...],
    rank: int,
    num_local: int,
    codec: AbstractCodec,
) -> tuple[Sent, Sent]:
    """Return what is sent in the first hop and in the second; arguments by rank and part."""
    inside, across = Sent(), Sent()
    node, local = divmod(rank, num_local)
    for peer, row in enumerate(zip(numels, payload, strict=True)):
        parts = zip(*row, strict=True)
        sent = (chunk_sent(*part, itemsize=1, codec=codec) for part in parts)
        if peer % num_local != local:
            inside = sum(sent, start=inside)
        elif peer // num_local != node:
            across = sum(sent, start=across)
    return inside, across
