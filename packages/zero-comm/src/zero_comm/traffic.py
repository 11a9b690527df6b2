"""Counts of what a rank has sent, by operation and by subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import TypeAlias

from attrs import Factory, define, field

from .planning import Sent


@define
class OperationTraffic:
    """Calls of one kind of operation, and what they have sent from this rank so far."""

    calls: int = 0
    # Elements that carry data, summed over the peers that they were sent to.
    payload_numel: int = 0
    payload_bytes: int = 0
    padding_bytes: int = 0
    scale_bytes: int = 0
    # The part that was sent to other nodes, where these are known.
    across: Sent = field(factory=Sent)

    @property
    def sent(self) -> Sent:
        """Return what was sent to all peers, inside the node and across nodes."""
        return Sent(self.payload_numel, self.payload_bytes, self.padding_bytes, self.scale_bytes)

    @property
    def inside(self) -> Sent:
        """Return what was sent inside this rank's node."""
        return self.sent - self.across

    def add(self, *, calls: int, inside: Sent, across: Sent) -> None:
        """Count what `calls` calls sent together."""
        self.calls += calls
        for sent in (inside, across):
            self.payload_numel += sent.payload_numel
            self.payload_bytes += sent.payload_bytes
            self.padding_bytes += sent.padding_bytes
            self.scale_bytes += sent.scale_bytes
        # Few groups send anything to other nodes, so the sum is rarely needed.
        if across.payload_numel or across.padding_bytes:
            self.across += across


# Operation, subject, number of calls that it counts as, and a function with its arguments that
# returns what was sent, inside the node and across nodes.
Call: TypeAlias = tuple[str, str, int, Callable[..., tuple[Sent, Sent]], tuple[Hashable, ...]]


@define(eq=False)
class Traffic:
    """Counted collectives. They are added up when read, so that a step does not wait for it."""

    counted: Counter[Call] = Factory(Counter)

    @property
    def operations(self) -> dict[str, OperationTraffic]:
        """Traffic by name: all_gather, gather, reduce_scatter, all_reduce, broadcast, agree."""
        return _add_up(self.counted)

    @property
    def subjects(self) -> dict[str, dict[str, OperationTraffic]]:
        """Traffic by subject of the calls' `Purpose`, "" where none is known, then by name."""
        found: dict[str, Counter[Call]] = {}
        for call, times in self.counted.items():
            found.setdefault(call[1], Counter())[call] = times
        return {subject: _add_up(calls) for subject, calls in found.items()}

    def payload_numel(self, *names: str) -> int:
        """Payload elements sent by the named operations; by all but `agree` when none is named.

        `agree` is control: checksums, flags and scalars. The published formulas leave it out.
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
