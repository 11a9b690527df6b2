"""The whole of a parameter's optimizer state, put together from what the ranks have of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import asdict
from torch import Tensor
from zero_comm import Group, all_gather_flat, all_gather_json

from ._errors import StateError
from ._flat_buffer import FlatBuffer
from ._span import Span
from ._state_entry import Entry, OwnEntry, PlainEntry, Said, plan_entry

SaidOfState: TypeAlias = dict[str, Said]  # by entry


def ask_states(
    states: Sequence[Mapping[str, Any]],
    *,
    group: Group,
    tag: int = 0,
    timeout_s: float | None = None,
) -> list[list[SaidOfState]]:
    """Which entries each rank has, by rank and by parameter. Collective.

    Args:
        states: This rank's, one per parameter, in the same order on every rank.
        group: The ranks to ask.
        tag: As for `all_gather_flat`.
        timeout_s: As for `all_gather_json`.
    """
    mine = [{key: asdict(Said.of(value)) for key, value in state.items()} for state in states]
    theirs = all_gather_json(mine, group=group, tag=tag, timeout_s=timeout_s)
    return [[{k: Said(**what) for k, what in state.items()} for state in of] for of in theirs]


def spans_said(keeps: Sequence[Span | None]) -> list[list[int] | None]:
    """As JSON can say it."""
    return [None if span is None else [span.start, span.stop] for span in keeps]


def keeps_of(buffer: FlatBuffer, position: int) -> tuple[Span | None, ...]:
    """By rank, the elements of a parameter that it keeps; None if there are none. Local."""
    layout = buffer.plan.layout
    span = layout.spans[position]
    overlaps = (span.overlap(shard) for shard in layout.shards)
    return tuple(None if part is None else part.shifted(-span.start) for part in overlaps)


def plan_state(
    buffer: FlatBuffer, position: int, said: Sequence[SaidOfState], *, has_own: bool = False
) -> dict[str, Entry]:
    """How each entry of a parameter's state lies over the ranks. Local.

    Args:
        buffer: Where the parameter lies.
        position: Among the buffer's parameters.
        said: Of this parameter, by rank.
        has_own: Whether an entry without a whole is each rank's own, and no error.

    Raises:
        StateError: As for `plan_entry`.
    """
    param, keeps = buffer.plan.params[position], keeps_of(buffer, position)
    keys = dict.fromkeys(key for of_rank in said for key in of_rank)
    entries: dict[str, Entry] = {}
    for key in keys:
        of_entry = [of.get(key) for of in said]
        try:
            entries[key] = plan_entry(param, key, keeps, of_entry)
        except StateError:
            if not has_own or any(s is not None and s.described is None for s in of_entry):
                raise
            entries[key] = OwnEntry(tuple(of_entry))
    return entries


def launch_entry(
    entry: Entry, state: Mapping[str, Any], key: str, *, group: Group, tag: int = 0
) -> Callable[[], Any]:
    """Launch the gather of a whole entry. Collective.

    Args:
        entry: How it lies over the ranks.
        state: This rank's state of the parameter.
        key: The entry's name in it.
        group: The ranks it lies on.
        tag: As for `all_gather_flat`.

    Returns:
        Call it once to wait; gives the whole, memory of its own, where the optimizer has it (host
        or device).
    """
    assert not isinstance(entry, OwnEntry), "there is no whole"
    if isinstance(entry, PlainEntry):
        return lambda: state.get(key, entry.value)
    whole = torch.empty(entry.shape, dtype=entry.dtype, device=group.device)
    numel = entry.splits[group.rank]
    part: Tensor = state[key] if numel else whole.new_empty(0)
    splits = [count * entry.dtype.itemsize for count in entry.splits]
    handle = all_gather_flat(  # as bytes: not every backend knows every dtype of state
        whole.view(-1).view(torch.uint8),
        splits=splits,
        group=group,
        shard=part.detach().to(group.device).contiguous().view(-1).view(torch.uint8),
        tag=tag,
    )

    def wait() -> Tensor:
        handle.wait()
        return whole.cpu() if entry.is_on_host else whole

    return wait
