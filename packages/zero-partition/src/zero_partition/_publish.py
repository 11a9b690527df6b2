"""Parameters that rest whole: every rank sends the shard that its optimizer has updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor
from zero_comm import Handle, all_gather_flat

from ._limits import ENCODED_IN_FLIGHT
from ._unit import Unit


def publish(units: Sequence[Unit]) -> None:
    """All-gather them in place. Collective; waits.

    What travels as it is takes no memory on its way, and all of it is launched at once.
    """
    is_encoded = any(buffer.codec is not None for unit in units for buffer in unit.buffers)
    limit = ENCODED_IN_FLIGHT if is_encoded else len(units)
    in_flight: deque[list[Handle[Tensor]]] = deque()
    for unit in units:
        if len(in_flight) == limit:
            _wait(in_flight.popleft())
        if handles := list(_launch(unit)):
            in_flight.append(handles)
    for handles in in_flight:
        _wait(handles)


def _launch(unit: Unit) -> Iterator[Handle[Tensor]]:
    for buffer in unit.buffers:
        if buffer.whole is None or not buffer.plan.trainable:
            continue
        if unit.errors is not None and buffer.codec is not None:
            unit.errors.params.note(unit.name, buffer.codec, [buffer.shard])
        buffer.is_unrounded = False
        yield all_gather_flat(
            buffer.whole,
            splits=buffer.plan.layout.splits,
            payload=buffer.plan.layout.payload_splits,
            group=unit.group,
            tag=buffer.gather_tag,
            codec=buffer.codec,
        )


def _wait(handles: Sequence[Handle[Tensor]]) -> None:
    for handle in handles:
        handle.wait()
