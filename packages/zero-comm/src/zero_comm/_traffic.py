"""Count what a rank sends: calls, payload, padding and scales, per operation, level and subject."""

from __future__ import annotations

from attrs import Factory, define, field

from ._sent import Sent


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
        total = self.sent + inside + across
        self.calls += calls
        self.payload_numel, self.payload_bytes = total.payload_numel, total.payload_bytes
        self.padding_bytes, self.scale_bytes = total.padding_bytes, total.scale_bytes
        self.across += across


@define(eq=False)
class Traffic:
    """Per operation: all_gather, gather, reduce_scatter, all_reduce, broadcast, agree.

    `subjects` has the same again by the subject of their `Purpose`, "" where none is known.
    """

    operations: dict[str, OperationTraffic] = Factory(dict)
    subjects: dict[str, dict[str, OperationTraffic]] = Factory(dict)

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

    def add(self, name: str, *, subject: str, calls: int, inside: Sent, across: Sent) -> None:
        """Count what `calls` calls of `name` sent together."""
        for operations in (self.operations, self.subjects.setdefault(subject, {})):
            operation = operations.setdefault(name, OperationTraffic())
            operation.add(calls=calls, inside=inside, across=across)

    def _chosen(self, names: tuple[str, ...]) -> list[OperationTraffic]:
        chosen = names or tuple(name for name in self.operations if name != "agree")
        return [self.operations[name] for name in chosen if name in self.operations]


@define(eq=False)
class TrafficLog:
    """What was sent since the last turn, and in the one before: for who asks afterwards."""

    now: Traffic = Factory(Traffic)
    last: Traffic | None = None  # None before the first turn

    def turn(self) -> None:
        """Begin anew."""
        self.now, self.last = Traffic(), self.now
