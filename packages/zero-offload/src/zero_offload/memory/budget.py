"""Budget for the host memory of a process: bytes by name, within a limit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from attrs import define, field, frozen

from zero_offload.errors import BudgetError

# A larger limit means none: cgroup v1 writes a number near 2^63 then.
_UNLIMITED: Final = 1 << 60


@frozen
class AvailableMemory:
    """Bytes that may be allocated, and the source of that limit."""

    nbytes: int
    source: str


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """Return the least memory that the machine and the control groups of this process have left.

    Memory that the kernel can drop at once (the page cache) counts as available. Linux; where
    nothing can be read, everything is taken to be available.
    """
    found = [*_of_machine(root), *_of_groups(root)]
    return min(found, key=lambda each: each.nbytes, default=AvailableMemory(_UNLIMITED, "unknown"))


def _of_machine(root: Path) -> Iterator[AvailableMemory]:
    kib = _statistic(root / "proc/meminfo", "MemAvailable:")
    if kib is not None:
        yield AvailableMemory(kib * 1024, "MemAvailable")


# Files of a control group with its limit and its use, and the statistic of what can be dropped.
_VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2: Final = ("memory.max", "memory.current", "inactive_file")


def _of_groups(root: Path) -> Iterator[AvailableMemory]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from _upwards(root / mount, group, *_VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _upwards(root / "sys/fs/cgroup/memory", group, *_VERSION_1)


def _upwards(
    mount: Path, group: str, limit: str, usage: str, droppable: str
) -> Iterator[AvailableMemory]:
    """Yield the memory left in a group and its parents; in a container the mount is the group."""
    folder = mount / group.strip("/")
    for each in (folder, *folder.parents):
        most, taken = _number(each / limit), _number(each / usage)
        if most is not None and taken is not None and most < _UNLIMITED:
            rest = max(0, most - taken + (_statistic(each / "memory.stat", droppable) or 0))
            yield AvailableMemory(rest, f"control group limit {each / limit}")
        if each == mount:
            return


def _statistic(path: Path, name: str) -> int | None:
    return next(
        (int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), None
    )


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    # A control group without a limit has "max".
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# Memory that is left free for other allocations of this process and for the machine, so that these
# do not start the kernel's out-of-memory killer.
_MARGIN_BYTES: Final = 128 * 2**20


@final
@define(eq=False)
class HostBudget:
    """Counts the bytes of host memory by name. Safe to use from several threads.

    Args:
        limit_bytes: Most bytes of all names together; None: the memory of the machine.
        available: Measures the memory that the machine and the control groups have left.
    """

    limit_bytes: int | None = None
    available: Callable[[], AvailableMemory] = available_memory
    _held: Counter[str] = field(factory=Counter, init=False)
    # Bytes that are counted in `_held` but not touched yet: the kernel still reports them as free.
    _untouched_bytes: int = field(default=0, init=False)
    # Reentrant: the garbage collector may run a finalizer that gives memory back in a thread that
    # has the lock.
    _lock: threading.RLock = field(factory=threading.RLock, init=False)

    @contextmanager
    def taking(self, name: str, nbytes: int) -> Iterator[None]:
        """Count `nbytes` more for `name`, while the block makes them resident.

        If the block raises, they are not counted.

        Raises:
            BudgetError: There is not so much memory; the block is not entered.
        """
        self._take(name, nbytes)
        try:
            yield
        except BaseException:
            self.give_back(name, nbytes)
            raise
        finally:
            with self._lock:
                self._untouched_bytes -= nbytes

    def _take(self, name: str, nbytes: int) -> None:
        with self._lock:
            total = self._held.total()
            if self.limit_bytes is not None and total + nbytes > self.limit_bytes:
                rest = max(0, self.limit_bytes - total)
                raise self._refusal(name, nbytes, rest, f"the budget of {_bytes(self.limit_bytes)}")
            machine = self.available()
            rest = max(0, machine.nbytes - self._untouched_bytes - _MARGIN_BYTES)
            if nbytes > rest:
                raise self._refusal(name, nbytes, rest, f"this machine ({machine.source})")
            self._held[name] += nbytes
            self._untouched_bytes += nbytes

    def give_back(self, name: str, nbytes: int) -> None:
        """Count `nbytes` fewer for `name`."""
        with self._lock:
            self._held[name] -= nbytes
            if not self._held[name]:
                del self._held[name]

    def held(self) -> dict[str, int]:
        """Bytes by name, the largest first."""
        with self._lock:
            return dict(Counter(dict(self._held)).most_common())

    def _refusal(self, name: str, nbytes: int, rest: int, who: str) -> BudgetError:
        held = self.held()
        lines = "".join(f"\n  {_bytes(each)}  {holder}" for holder, each in held.items())
        return BudgetError(
            f"{name!r} asks for {_bytes(nbytes)} of host memory, and {who} has {_bytes(rest)} "
            f"left. Allocated by this process: {_bytes(sum(held.values()))}{lines}\nOffload more "
            "to disk (DiskStore), use fewer or smaller buffers, or raise it with "
            "set_host_budget().",
            nbytes=nbytes,
            held=held,
        )


PROCESS_BUDGET: Final = HostBudget()


def set_host_budget(limit_bytes: int | None) -> None:
    """Limit the bytes that all arenas of this process allocate together; None: no limit.

    Memory that is allocated already stays so, even if it is more.
    """
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(
            f"a budget is a number of bytes >= 0, or None for no limit; got {limit_bytes}"
        )
    PROCESS_BUDGET.limit_bytes = limit_bytes


def host_memory() -> dict[str, int]:
    """Return the bytes of host memory that are allocated under each name, the largest first."""
    return PROCESS_BUDGET.held()


def _bytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB ({nbytes} bytes)"
