"""What every rank does at once: if it fails on one, all know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_comm import Group, all_gather_json

from ._errors import FileError


def together(
    act: Callable[[], Any], *, what: str, group: Group, timeout_s: float | None = None
) -> list[Any]:
    """Do it on every rank, and wait until all have. Collective.

    Args:
        act: What; returns what JSON can say.
        what: The same in words, for other ranks' errors.
        group: The ranks.
        timeout_s: How long to wait for a rank; the group's own timeout when None.

    Returns:
        What it has returned, by rank.

    Raises:
        Exception: On the rank on which it has failed: that.
        FileError: On all others.
        zero_comm.CommError: A rank did not take part in time.
    """
    problem, result = None, None
    try:
        result = act()
    except Exception as error:
        problem = error
    mine = ["" if problem is None else f"{type(problem).__name__}: {problem}", result]
    said = all_gather_json(mine, group=group, timeout_s=timeout_s)
    if problem is not None:
        raise problem
    for rank, (theirs, _) in enumerate(said):
        if theirs:
            raise FileError(f"{what}: rank {rank} failed (seen on rank {group.rank}): {theirs}")
    return [result for _, result in said]
