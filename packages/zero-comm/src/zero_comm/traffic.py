"""What a rank sends: how much of a flat buffer goes out, and the counts of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from attrs import Factory, define, field, frozen

from zero_comm.codecs.codec import AbstractCodec


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


@define
class OperationTraffic:
    """What one kind of operation has sent from this rank so far."""

    calls: int = 0
    payload_numel: int = 0  # elements that carry data, summed over the peers they were sent to
    payload_bytes: int = 0
    padding_bytes: int = 0
    scale_bytes: int = 0  # what codecs add to their integers
    across: Sent = field(
        factory=Sent
    )  # of all this, what was sent to other nodes, as far as these are known

    @property
    def sent(self) -> Sent:
        """To whomever."""
        return Sent(self.payload_numel, self.payload_bytes, self.padding_bytes, self.scale_bytes)

    @property
    def inside(self) -> Sent:
        """What stayed inside this rank's node."""
        return self.sent - self.across

    def add(self, *, calls: int, inside: Sent, across: Sent) -> None:
        """Count what `calls` calls sent together."""
        self.calls += calls
        for sent in (inside, across):
            self.payload_numel += sent.payload_numel
            self.payload_bytes += sent.payload_bytes
            self.padding_bytes += sent.padding_bytes
            self.scale_bytes += sent.scale_bytes
        if across.payload_numel or across.padding_bytes:  # few groups know of other nodes
            self.across += across


# How often was called what, under which subject, counted as so many calls; and what it sends.
Call: TypeAlias = tuple[str, str, int, Callable[..., tuple[Sent, Sent]], tuple[Hashable, ...]]


@define(eq=False)
class Traffic:
    """What was sent, added up when it is read: a step should not have to wait for it."""

    counted: Counter[Call] = Factory(Counter)

    @property
    def operations(self) -> dict[str, OperationTraffic]:
        """By name: all_gather, gather, reduce_scatter, all_reduce, broadcast, agree."""
        return _add_up(self.counted)

    @property
    def subjects(self) -> dict[str, dict[str, OperationTraffic]]:
        """The same again by the subject of their `Purpose`, "" where none is known."""
        found: dict[str, Counter[Call]] = {}
        for call, times in self.counted.items():
            found.setdefault(call[1], Counter())[call] = times
        return {subject: _add_up(calls) for subject, calls in found.items()}

    def payload_numel(self, *names: str) -> int:
        """Payload elements sent by the named operations; by all but `agree` when none is named.

        `agree` is control: fingerprints, flags and scalars. The published formulas leave it out.
        """
        return sum(operation.payload_numel for operation in self._chosen(names))

    def inside(self, *names: str) -> Sent:
        """Sent inside this rank's node by the named operations; by all but `agree` when none is."""
        return sum((operation.inside for operation in self._chosen(names)), start=Sent())

    def across(self, *names: str) -> Sent:
        """Sent to other nodes by the named operations; by all but `agree` when none is named."""
        return sum((operation.across for operation in self._chosen(names)), start=Sent())

    def _chosen(self, names: tuple[str, ...]) -> list[OperationTraffic]:
        operations = self.operations
        chosen = names or tuple(name for name in operations if name != "agree")
        return [operations[name] for name in chosen if name in operations]


def _add_up(counted: Mapping[Call, int]) -> dict[str, OperationTraffic]:
    operations: dict[str, OperationTraffic] = {}
    for (name, _, calls, sent, args), times in counted.items():
        operation = operations.setdefault(name, OperationTraffic())
        inside, across = (each * times for each in sent(*args))
        operation.add(calls=calls * times, inside=inside, across=across)
    return operations
