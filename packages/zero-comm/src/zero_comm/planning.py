"""What a collective sends: how much of a flat buffer goes out, inside a node and across."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from attrs import frozen

from zero_comm.codecs.codec import AbstractCodec

__all__ = ["Sent", "sent_by_levels", "sent_of"]


@frozen
class Sent:
    """What went out, summed over the peers it was sent to."""

    payload_numel: int = 0  # elements that carry data
    payload_bytes: int = 0
    padding_bytes: int = 0
    scale_bytes: int = 0  # what a codec adds to its integers

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.payload_bytes + self.padding_bytes + self.scale_bytes

    def __add__(self, other: Sent) -> Sent:
        """Both."""
        return Sent(
            self.payload_numel + other.payload_numel,
            self.payload_bytes + other.payload_bytes,
            self.padding_bytes + other.padding_bytes,
            self.scale_bytes + other.scale_bytes,
        )

    def __mul__(self, times: int) -> Sent:
        """So many."""
        return Sent(
            self.payload_numel * times,
            self.payload_bytes * times,
            self.padding_bytes * times,
            self.scale_bytes * times,
        )

    def __sub__(self, other: Sent) -> Sent:
        """The rest."""
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
    """What an algorithm that sends each element once to each rank that needs it sends. Local.

    Args:
        splits: Elements per rank, in rank order.
        payload: Those of them that carry data; `splits` when None.
        rank: Whose.
        sends_own: Its own chunk to every peer, as in an all-gather; else every peer its chunk, as
            in a reduce-scatter. An all-reduce does both.
        itemsize: Bytes of an element, where no codec says otherwise.
        codec: In which chunks travel.
        nodes: Of each rank; all on one when empty.

    Returns:
        Inside the rank's node, and across nodes.
    """
    payload = splits if payload is None else payload
    chunks = (tuple(splits), tuple(payload), tuple(nodes))
    return sent_flat(*chunks, rank, sends_own, itemsize, codec)


@lru_cache(maxsize=4096)  # the same collectives come again in every step
def sent_flat(  # noqa: PLR0917 (what `Group.count` keeps of a call is a tuple)
    splits: tuple[int, ...],
    payload: tuple[int, ...],
    nodes: tuple[int, ...],
    rank: int,
    sends_own: bool,
    itemsize: int,
    codec: AbstractCodec | None,
) -> tuple[Sent, Sent]:
    """As `sent_of`."""
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
    """What a chunk of `numel` elements is, of which `payload` carry data, once it is sent."""
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
    """What one rank sends in a `reduce_scatter_by_levels`: inside its node, and across. Local.

    Args:
        splits: Elements per rank, in rank order.
        payload: Those of them that carry data.
        rank: Whose.
        ranks_per_node: Neighbours in rank order share a node.
        codec: In which chunks travel.
    """
    numels, carried = (tuple((numel,) for numel in of) for of in (splits, payload))
    return sent_in_hops(numels, carried, rank, ranks_per_node, codec)


@lru_cache(maxsize=4096)  # the same reductions come again in every step
def sent_in_hops(
    numels: tuple[tuple[int, ...], ...],
    payload: tuple[tuple[int, ...], ...],
    rank: int,
    num_local: int,
    codec: AbstractCodec,
) -> tuple[Sent, Sent]:
    """In the first hop and in the second; by rank and part."""
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
