"""Journal of a rank: the buffers that it offers and is done with, in memory that peers read."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Final
from weakref import finalize

from attrs import Factory, define, field, frozen

from .process_memory import read

OFFER, DONE = 1, 2  # kinds of entries

Entry = tuple[int, int, int]  # kind, tag, address

_WORD: Final = 8  # bytes
_ENTRY_WORDS: Final = 3
# A journal has three words of header, then a word per rank (how many entries of that rank's journal
# this rank has read), then a ring of `_CAPACITY` entries.
_TOKEN, _HEAD, _LEAVING = 0, 1, 2
_CONSUMED: Final = 3
_CAPACITY: Final = 1024


@frozen
class JournalAddress:
    """Address of a rank's journal. Ranks exchange it once, by messages."""

    pid: int
    address: int
    # First word of the journal, by which a reader knows that this process made it.
    token: int


@define(eq=False)
class Journal:
    """This rank's journal. Callers make sure that one thread writes at a time."""

    world_size: int
    token: int = field(factory=lambda: int.from_bytes(os.urandom(7), "little"))
    _words: ctypes.Array[ctypes.c_int64] = field(init=False)
    # Number of an entry -> the entry; kept until the ring has all of them.
    _outbox: dict[int, Entry] = field(factory=dict, init=False)
    # Every peer has read at least so many entries.
    _read_by_all: int = field(default=0, init=False)
    _fence: threading.Lock = field(default=Factory(threading.Lock), init=False)

    def __attrs_post_init__(self) -> None:
        num_words = _CONSUMED + self.world_size + _CAPACITY * _ENTRY_WORDS
        self._words = (ctypes.c_int64 * num_words)()
        self._words[_TOKEN] = self.token
        finalize(self, _close, self._words).atexit = False  # type: ignore[attr-defined]

    @property
    def whereabouts(self) -> JournalAddress:
        """Return the process id, address and token by which peers read the journal."""
        return JournalAddress(os.getpid(), ctypes.addressof(self._words), self.token)

    @property
    def num_written(self) -> int:
        """Number of entries, including those in the outbox."""
        return max(self._words[_HEAD], next(reversed(self._outbox), -1) + 1)

    @property
    def head(self) -> int:
        """Number of entries that peers can see, including those overwritten since."""
        return self._words[_HEAD]

    def write(self, entry: Entry, *, read_by_all: Callable[[int], int]) -> None:
        """Append an entry; while the ring is full, it waits in the outbox. See `publish`."""
        self._outbox[self.num_written] = entry
        self.publish(read_by_all)

    def publish(self, read_by_all: Callable[[int], int]) -> None:
        """Copy entries from the outbox to the ring, as many as fit.

        After an exception, the next call continues: no entry is lost or appears twice.

        Args:
            read_by_all: Returns how many of the first `head` entries every peer has read; called
                with `head` when the ring is full.
        """
        if not self._outbox:
            return
        for head in range(self._words[_HEAD], self.num_written):
            if head - self._read_by_all >= _CAPACITY:
                self._read_by_all = read_by_all(head)
                if head - self._read_by_all >= _CAPACITY:
                    return
            start = _CONSUMED + self.world_size + head % _CAPACITY * _ENTRY_WORDS
            self._words[start : start + _ENTRY_WORDS] = self._outbox[head]
            # Peers that see the new head must see the data and the entry too.
            self.fence()
            self._words[_HEAD] = head + 1
        self._outbox.clear()

    def note_read(self, rank: int, num_entries: int) -> None:
        """Say how many entries of a peer's journal this rank has read."""
        self._words[_CONSUMED + rank] = num_entries

    def announce_exit(self) -> None:
        """Say that this process is about to end."""
        self._words[_LEAVING] = 1

    def void(self) -> None:
        """Let peers take this process for gone."""
        self._words[_TOKEN] = 0

    def fence(self) -> None:
        """Order writes: peers see earlier ones before later ones. A release, then an acquire."""
        with self._fence:
            pass
        with self._fence:
            pass


def read_header(where: JournalAddress) -> tuple[int, int, bool]:
    """A peer's token, its head, and whether it is leaving. Raises OSError."""
    header = _read(where, 0, _CONSUMED)
    return header[_TOKEN], header[_HEAD], bool(header[_LEAVING])


def read_num_read(by: int, where: JournalAddress) -> int:
    """How many entries of rank `by`'s journal the owner of this one has read. Raises OSError."""
    return _read(where, _CONSUMED + by, 1)[0]


def read_entries(seen: int, head: int, world_size: int, where: JournalAddress) -> list[Entry]:
    """A peer's entries from `seen` on, to `head` or to the end of the ring. Raises OSError."""
    first = seen % _CAPACITY
    count = min(head - seen, _CAPACITY - first)
    start = _CONSUMED + world_size + first * _ENTRY_WORDS
    words = _read(where, start, count * _ENTRY_WORDS)
    ring = iter(words)
    return list(zip(ring, ring, ring, strict=True))


def _read(where: JournalAddress, word: int, num_words: int) -> ctypes.Array[ctypes.c_int64]:
    words = (ctypes.c_int64 * num_words)()
    read(
        where.pid,
        where.address + word * _WORD,
        into=ctypes.addressof(words),
        num_bytes=num_words * _WORD,
    )
    return words


# A peer may read a journal after its group was freed here, so its memory is never freed. Journals
# are few, and 24 KiB each.
_CLOSED: Final[list[ctypes.Array[ctypes.c_int64]]] = []


def _close(words: ctypes.Array[ctypes.c_int64]) -> None:
    words[_TOKEN] = 0
    _CLOSED.append(words)
