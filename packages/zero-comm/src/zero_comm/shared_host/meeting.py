"""First exchange of the ranks of a group: may they read each other's memory, and where is it?"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
import torch.distributed as dist
from attrs import frozen

from zero_comm.circles import CircleWatch, break_connections
from zero_comm.handle import Message
from zero_comm.messages import Messages
from zero_comm.torch_private import timeout_of
from zero_comm.watch import Watch

from .journal import JournalAddress
from .peer_memory import PeerMemory
from .process_memory import SWITCH, allow_readers, is_supported
from .reads import Reads

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TAG: Final = (1 << 24) - 1  # just below the tags of other collectives


class _ReadStatus(IntEnum):
    OK = 0
    SWITCHED_OFF = 1
    NO_SUCH_CALL = 2
    OTHER_HOST = 3
    NOT_PERMITTED = 4


_REASONS: Final = {
    _ReadStatus.OK: "reads of peers' memory: all ranks run on one host and may",
    _ReadStatus.SWITCHED_OFF: f"has {SWITCH}=0 set",
    _ReadStatus.NO_SUCH_CALL: "runs on a system without process_vm_readv",
    _ReadStatus.OTHER_HOST: "runs on another host than a peer",
    _ReadStatus.NOT_PERMITTED: "may not read a peer's memory (another user, container or sandbox)",
}


@frozen
class Meeting:
    """Facts that the ranks of one process group found out together."""

    # None if the ranks cannot read each other's memory; `reason` says why, in one line.
    memory: PeerMemory | None
    reason: str
    watch: Watch
    # By rank, a number of the host, which is equal for ranks of one host.
    hosts: tuple[int, ...]

    def exchanges_of(self, process_group: Any, rank: int, world_size: int) -> Messages:
        """Return how these ranks exchange parts of buffers."""
        if self.memory is None:
            return Messages(process_group, rank, world_size)
        return Reads(process_group, rank, world_size, self.memory)


_FOUND: Final[WeakKeyDictionary[Any, Meeting]] = WeakKeyDictionary()


def meet(
    process_group: Any, *, rank: int, world_size: int, timeout_s: float | None = None
) -> Meeting:
    """Find out whether the ranks of a gloo group may read each other's memory.

    Collective and blocking the first time.

    Args:
        process_group: Of torch, with gloo for the CPU.
        rank: This rank's position in it.
        world_size: Ranks in it.
        timeout_s: Longest wait for another rank, in seconds; the group's own when None.

    Raises:
        CommError: A rank did not come in time.
    """
    found = _FOUND.get(process_group)
    if found is None:
        table = _Table(process_group, rank, world_size, timeout_s)
        found = _FOUND[process_group] = _find_out(table)
    return found


def _find_out(table: _Table) -> Meeting:
    timeout = timeout_of(table.process_group, torch.device("cpu"))
    peers = PeerMemory(table.rank, table.world_size, timeout_s=timeout.total_seconds())
    where, verdict = peers.whereabouts, _try_alone()
    mine = [verdict, _boot_id(), os.getppid(), where.pid, where.address, where.token]
    hello = table.tell_all(mine)
    hosts = tuple(row[1] for row in hello)
    interrupt = partial(break_connections, ref(table.process_group))
    # Weak, as a cycle would keep a dropped group alive until the garbage collector runs.
    is_leaving = WeakMethod(peers.is_leaving)

    def has_ended(rank: int) -> bool:
        return (ask := is_leaving()) is not None and ask(rank)

    # The random token of rank 0's journal is a name that no group had before.
    name = f"{hello[0][-1]:x}"
    watch = peers.watch = CircleWatch(name, table.rank, interrupt, has_ended=has_ended)
    if all(row[0] == _ReadStatus.OK for row in hello):
        if any(row[1] != mine[1] for row in hello):
            verdict = _ReadStatus.OTHER_HOST
        else:
            # If one launcher has started all ranks, only its descendants are allowed to read.
            is_launched = all(row[2] == mine[2] for row in hello)
            allow_readers(os.getppid() if is_launched else None)
    # After this exchange, all ranks have allowed the others to read.
    verdicts = table.tell_all([verdict])
    if all(row == [_ReadStatus.OK] for row in verdicts):
        try:
            peers.meet([JournalAddress(*row[3:]) for row in hello])
        except OSError:
            verdict = _ReadStatus.NOT_PERMITTED
        verdicts = table.tell_all([verdict])
    for other, (number,) in enumerate(verdicts):
        if number != _ReadStatus.OK:
            reason = f"messages, because rank {other} {_REASONS[_ReadStatus(number)]}"
            return Meeting(None, reason, watch, hosts)
    return Meeting(peers, _REASONS[_ReadStatus.OK], watch, hosts)


def _try_alone() -> _ReadStatus:
    if os.environ.get(SWITCH, "1") == "0":
        return _ReadStatus.SWITCHED_OFF
    return _ReadStatus.OK if is_supported() else _ReadStatus.NO_SUCH_CALL


def _boot_id() -> int:
    """Return a number that is equal in all processes of one booted system; 0 if it has none."""
    return zlib.crc32(_BOOT_ID.read_bytes()) if _BOOT_ID.exists() else 0


@frozen
class _Table:
    """Ranks that tell each other numbers, by messages."""

    process_group: Any
    rank: int
    world_size: int
    timeout_s: float | None

    def tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, in rank order. Collective."""
        rows = torch.tensor([numbers] * self.world_size, dtype=torch.int64, device="cpu")
        works, options = [], {"group": self.process_group, "tag": _TAG}
        for rank in range(self.world_size):
            if rank != self.rank:
                peer = dist.get_global_rank(self.process_group, rank)
                works.append(dist.irecv(rows[rank], peer, **options))
                works.append(dist.isend(rows[self.rank], peer, **options))
        for work in works:
            Message(work, "meeting the other ranks of a new group").wait(timeout_s=self.timeout_s)
        return rows.tolist()
