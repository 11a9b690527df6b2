"""Count what a rank sends: calls, payload and padding, per operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import Factory, define

if TYPE_CHECKING:
    from ._group import Group


@define
class OperationTraffic:
    """What one kind of operation has sent from this rank so far."""

    calls: int = 0
    payload_numel: int = 0  # elements that carry data, summed over the peers they were sent to
    payload_bytes: int = 0
    padding_bytes: int = 0


@define(eq=False)
class Traffic:
    """Per operation: all_gather, gather, reduce_scatter, all_reduce, broadcast, agree."""

    operations: dict[str, OperationTraffic] = Factory(dict)

    def payload_numel(self, *names: str) -> int:
        """Payload elements sent by the named operations; by all but `agree` when none is named.

        `agree` is control: fingerprints, flags and scalars. The published formulas leave it out.
        """
        chosen = names or tuple(name for name in self.operations if name != "agree")
        return sum(
            self.operations[name].payload_numel for name in chosen if name in self.operations
        )

    def add(
        self, name: str, *, calls: int, payload_numel: int, padding_numel: int, itemsize: int
    ) -> None:
        """Count what `calls` calls of `name` sent together."""
        operation = self.operations.setdefault(name, OperationTraffic())
        operation.calls += calls
        operation.payload_numel += payload_numel
        operation.payload_bytes += payload_numel * itemsize
        operation.padding_bytes += padding_numel * itemsize


@contextmanager
def record_traffic(group: Group) -> Iterator[Traffic]:
    """Count every collective of `group` launched inside the context. Local.

    What counts is what an algorithm that sends each element once to each rank that needs it sends
    from this rank: (N-1) shards for an all-gather, all but the own shard for a reduce-scatter, the
    sum of both for an all-reduce. So a buffer of M elements costs M(N-1)/N, averaged over ranks.
    """
    traffic = Traffic()
    group.recorders.append(traffic)
    try:
        yield traffic
    finally:
        group.recorders.remove(traffic)
