"""Checks that ranks agree on what they are about to do, before they exchange data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from .errors import AgreementError
from .flat import all_gather_flat
from .group import Group


def check_agreement(
    facts: Mapping[str, str], *, group: Group, tag: int = 0, timeout_s: float | None = 30.0
) -> None:
    """Raise on every rank unless all ranks pass the same facts, in the same order. Collective.

    Args:
        facts: What must be equal everywhere, by a name that a user understands. Of a value with
            several parts, as in "this; that", the error has the first that differs.
        group: The ranks that must agree.
        tag: As for `all_gather_flat`.
        timeout_s: How long to wait for a rank that does not call this, in seconds; the group's own
            timeout when None.

    Raises:
        AgreementError: Names the first fact that differs, the ranks and both values.
        CommError: A rank did not take part in time.
    """
    if group.world_size == 1:
        return
    theirs = all_gather_json(list(facts.items()), group=group, tag=tag, timeout_s=timeout_s)
    for rank, other in enumerate(theirs):
        if other != theirs[0]:
            raise AgreementError(_describe(theirs[0], other, rank, group))


def all_gather_json(
    value: Any, *, group: Group, tag: int = 0, timeout_s: float | None = None
) -> list[Any]:
    """Every rank's value, in rank order. Collective. Counts as control traffic.

    Args:
        value: What JSON can say, NaN too: numbers, strings, None, lists and dicts of these. A tuple
            arrives as a list, and a key of a dict as a string.
        group: The ranks that take part.
        tag: As for `all_gather_flat`.
        timeout_s: How long to wait for a rank that does not call this, in seconds; the group's own
            timeout when None.

    Raises:
        TypeError: JSON cannot say it; on this rank, before anything is sent.
        CommError: A rank did not take part in time.
    """
    text = json.dumps(value)
    # A single rank need not wait for the device.
    if group.world_size == 1:
        return [json.loads(text)]
    group.compare_launches("exchanging facts", at_once=True, timeout_s=timeout_s)
    own = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)
    numels = _gather(
        torch.tensor([[own.numel()]], device="cpu"), group, tag=tag, timeout_s=timeout_s
    )
    splits = [int(numel) for numel in numels]
    # Texts are padded to the longest one: not every backend gathers uneven pieces.
    padded = torch.zeros(1, max(splits), dtype=torch.uint8, device="cpu")
    padded[0, : own.numel()] = own
    rows = _gather(padded, group, tag=tag, timeout_s=timeout_s)
    return [
        json.loads(bytes(row[:numel].tolist())) for row, numel in zip(rows, splits, strict=True)
    ]


def _gather(row: torch.Tensor, group: Group, *, tag: int, timeout_s: float | None) -> torch.Tensor:
    """Every rank's row, one below the other, on the CPU."""
    shard = row.view(-1).to(group.device)
    out = shard.new_empty(group.world_size * shard.numel())
    splits = [shard.numel()] * group.world_size
    handle = all_gather_flat(out, splits=splits, group=group, shard=shard, tag=tag, control=True)
    return handle.wait(timeout_s=timeout_s).view(group.world_size, -1).cpu()


def _first_apart(one: str, other: str) -> tuple[str, str]:
    """Return the first parts, as in "this; that", in which two values differ."""
    pairs = [*zip(one.split("; "), other.split("; "), strict=False)]
    return next((pair for pair in pairs if pair[0] != pair[1]), (one, other))


def _describe(first: list[list[str]], other: list[list[str]], rank: int, group: Group) -> str:
    names, other_names = dict(first), dict(other)
    for (name, value), (other_name, other_value) in zip(first, other, strict=False):
        if name != other_name:
            # The lists go on alike after what only one of them has.
            if (name in other_names) != (other_name in names):
                break
            return (
                f"ranks disagree: rank 0 has {name} where rank {rank} has {other_name} (seen on "
                f"rank {group.rank}); every rank must run the same code on the same model"
            )
        if value != other_value:
            one, its = _first_apart(value, other_value)
            return (
                f"ranks disagree on {name}: rank 0 has {one}, rank {rank} has {its} "
                f"(seen on rank {group.rank}); every rank must pass the same"
            )
    extra = [each for each in first if each[0] not in other_names]
    longer = 0 if extra else rank
    extra = extra or [each for each in other if each[0] not in names]
    return (
        f"ranks disagree: only rank {longer} has {extra[0][0]} ({extra[0][1]}), comparing ranks 0 "
        f"and {rank} (seen on rank {group.rank}); every rank must run the same code on the "
        "same model"
    )
