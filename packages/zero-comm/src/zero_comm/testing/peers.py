"""Ranks of one process that read its memory as they would each other's, and reads that fail."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EPERM
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from zero_comm.shared_host import journal, meeting, peer_memory, process_memory, shards
from zero_comm.shared_host.peer_memory import PeerMemory


def local_peers(
    world_size: int,
    *,
    timeout_s: float = 20.0,
    told: Callable[[Any], Any] | None = None,
) -> list[PeerMemory]:
    """Return ranks of one group in this process, as `Reads.memory` has them. They have met.

    Args:
        world_size: Number of ranks.
        timeout_s: Timeout of their group, in seconds.
        told: Changes the address of the last rank's journal (pid, address, token) that the others
            are told.

    Raises:
        OSError: There is no such journal at that address.
    """
    peers = [PeerMemory(rank, world_size, timeout_s=timeout_s) for rank in range(world_size)]
    where = [peer.whereabouts for peer in peers]
    if told is not None:
        where[-1] = told(where[-1])
    for peer in peers:
        peer.meet(where)
    return peers


@contextmanager
def looking_alone(peer: PeerMemory) -> Iterator[None]:
    """Inside, a wait looks at this rank's news only: a process looks at all that it has. Local."""
    with mock.patch.object(peer_memory, "_ALL", [peer]):
        yield


@contextmanager
def journal_capacity(entries: int) -> Iterator[None]:
    """Inside, peers may lag behind by so many entries, of journals that are made there. Local."""
    with mock.patch.object(journal, "_CAPACITY", entries):
        yield


@contextmanager
def lingering(seconds: float) -> Iterator[None]:
    """Inside, a process that ends waits so long at most for who reads its shards. Local."""
    with mock.patch.object(shards, "_EXIT_WAIT_S", seconds):
        yield


@contextmanager
def cannot_read(why: Literal["switch", "permission", "system", "host"]) -> Iterator[None]:
    """Inside, this rank finds that it cannot read its peers' memory. Local.

    Args:
        why: The switch is off; it is not permitted; the system has no such call; or the peers are
            on another host.
    """
    if why == "switch":
        with mock.patch.dict(os.environ, {process_memory.SWITCH: "0"}):
            yield
    elif why == "host":
        with tempfile.TemporaryDirectory() as folder:
            boot_id = Path(folder, "boot_id")
            boot_id.write_text("another system's\n")
            with mock.patch.object(meeting, "_BOOT_ID", boot_id):
                yield
    else:
        call = _refuse if why == "permission" else None
        with mock.patch.object(process_memory, "_READ", call):
            yield


@contextmanager
def reads_refused(what: Literal["journal", "buffer"]) -> Iterator[None]:
    """Inside, reads of a peer's journal, or of a buffer it offers, are not permitted. Local."""
    refusal = PermissionError(EPERM, os.strerror(EPERM))
    place: tuple[Any, str] = {
        "journal": (journal, "read"),
        "buffer": (peer_memory, "read_into"),
    }[what]
    with mock.patch.object(*place, side_effect=refusal):
        yield


@contextmanager
def reads_cut_short(num_bytes: int) -> Iterator[None]:
    """Inside, the kernel reads so many bytes at a time, as it does 2 GiB of more. Local."""
    kernel = process_memory._READ

    def cut_short(*arguments: Any) -> int:
        for span in (arguments[1]._obj, arguments[3]._obj):
            span.num_bytes = min(num_bytes, span.num_bytes)
        return kernel(*arguments)

    with mock.patch.object(process_memory, "_READ", cut_short):
        yield


@contextmanager
def without_reads() -> Iterator[None]:
    """Inside, offering a buffer to peers is an AssertionError. Local."""
    error = AssertionError("a buffer was shared")
    with mock.patch.object(PeerMemory, "launch", side_effect=error):
        yield


def _refuse(*_: Any) -> int:
    ctypes.set_errno(EPERM)
    return -1
