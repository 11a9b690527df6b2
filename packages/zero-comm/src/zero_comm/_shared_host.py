"""Whether the ranks of a group can read each other's memory, and the journals if so."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import frozen

from . import _process_memory
from ._handle import wait_for
from ._peer_memory import PeerMemory, Whereabouts

SWITCH: Final = "ZERO_COMM_PEER_MEMORY"

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_HELLO_TAG: Final = (1 << 24) - 2  # before those of the compositions
_VERDICT_TAG: Final = (1 << 24) - 1


class _Verdict(IntEnum):
    OK = 0
    SWITCHED_OFF = 1
    NO_SUCH_CALL = 2
    OTHER_HOST = 3
    NOT_PERMITTED = 4


_REASONS: Final = {
    _Verdict.OK: "all ranks run on one host and may",
    _Verdict.SWITCHED_OFF: f"has {SWITCH}=0 set",
    _Verdict.NO_SUCH_CALL: "runs on a system without process_vm_readv",
    _Verdict.OTHER_HOST: "runs on another host than a peer",
    _Verdict.NOT_PERMITTED: "may not read a peer's memory (another user, container or sandbox)",
}


@frozen
class SharedHost:
    """What the ranks of one process group found out together."""

    peers: PeerMemory | None
    reason: str


_FOUND: Final[WeakKeyDictionary[Any, SharedHost]] = WeakKeyDictionary()


def shared_host(process_group: Any, *, rank: int, world_size: int) -> SharedHost:
    """What the ranks of this gloo group found out. Collective and blocking the first time."""
    found = _FOUND.get(process_group)
    if found is None:
        found = _FOUND[process_group] = _find_out(process_group, rank, world_size)
    return found


def _find_out(process_group: Any, rank: int, world_size: int) -> SharedHost:
    options = process_group._get_backend(torch.device("cpu")).options
    peers = PeerMemory(rank, world_size, timeout_s=options._timeout.total_seconds())
    where = peers.whereabouts
    verdict = _try_alone()
    mine = [verdict, _boot_id(), where.pid, where.address, where.token]
    hello = _tell_all(mine, process_group, rank, world_size, tag=_HELLO_TAG)
    if all(row[0] == _Verdict.OK for row in hello):
        verdict = _try_together(peers, hello)
    final = _tell_all([verdict], process_group, rank, world_size, tag=_VERDICT_TAG)
    for other, (number,) in enumerate(final):
        if number != _Verdict.OK:
            return SharedHost(None, f"messages, because rank {other} {_REASONS[_Verdict(number)]}")
    return SharedHost(peers, f"reads of peers' memory: {_REASONS[_Verdict.OK]}")


def _try_alone() -> _Verdict:
    if os.environ.get(SWITCH, "1") == "0":
        return _Verdict.SWITCHED_OFF
    if not _process_memory.is_supported():
        return _Verdict.NO_SUCH_CALL
    _process_memory.allow_readers()
    return _Verdict.OK


def _try_together(peers: PeerMemory, hello: Sequence[Sequence[int]]) -> _Verdict:
    if any(row[1] != _boot_id() for row in hello):
        return _Verdict.OTHER_HOST
    try:
        peers.meet([Whereabouts(*row[2:]) for row in hello])
    except OSError:
        return _Verdict.NOT_PERMITTED
    return _Verdict.OK


def _boot_id() -> int:
    """The same number on every process of one running system."""
    return zlib.crc32(_BOOT_ID.read_bytes()) if _BOOT_ID.exists() else 0


def _tell_all(
    numbers: Sequence[int], process_group: Any, rank: int, world_size: int, *, tag: int
) -> list[list[int]]:
    """Every rank's numbers, in rank order."""
    rows = torch.tensor([numbers] * world_size, dtype=torch.int64)
    works = []
    for other in range(world_size):
        if other != rank:
            peer = dist.get_global_rank(process_group, other)
            works.append(dist.irecv(rows[other], peer, group=process_group, tag=tag))
            works.append(dist.isend(rows[rank], peer, group=process_group, tag=tag))
    for work in works:
        wait_for(work, "meeting the other ranks of a new group")
    return rows.tolist()
