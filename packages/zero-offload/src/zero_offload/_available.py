"""How much memory this process may still take before the kernel ends somebody for it."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


@frozen
class Available:
    """Bytes that may be taken, and who sets that limit."""

    nbytes: int
    source: str


def available_memory(root: Path = Path("/")) -> Available:
    """The least that the machine and any control group above this process leave.

    Memory that the kernel can drop at once (the page cache) counts as available. Linux; where
    nothing can be read, everything is taken to be available.
    """
    found = [*_of_machine(root), *_of_groups(root)]
    return min(found, key=lambda each: each.nbytes, default=Available(_UNLIMITED, "unknown"))


def _of_machine(root: Path) -> list[Available]:
    path = root / "proc/meminfo"
    return [
        Available(int(line.split()[1]) * 1024, "MemAvailable")
        for line in _lines(path)
        if line.startswith("MemAvailable:")
    ]


def _of_groups(root: Path) -> list[Available]:
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                names = ("memory.max", "memory.current", "inactive_file")
                found += _upwards(root / mount, group, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _upwards(root / "sys/fs/cgroup/memory", group, *names)
    return found


def _upwards(mount: Path, group: str, limit: str, usage: str, droppable: str) -> list[Available]:
    """Of a group and those around it; within a container the mount is the group itself."""
    found = []
    folder = mount / group.strip("/")
    while True:
        most, taken = _number(folder / limit), _number(folder / usage)
        if most is not None and taken is not None and most < _UNLIMITED:
            rest = max(0, most - taken + _statistic(folder / "memory.stat", droppable))
            found.append(Available(rest, f"control group limit {folder / limit}"))
        if folder == mount:
            return found
        folder = folder.parent


def _statistic(path: Path, name: str) -> int:
    return sum(int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} "))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
