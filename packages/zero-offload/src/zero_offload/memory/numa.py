"""Memory nodes: which of them this process computes on, and spreading memory over them."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

_MPOL_INTERLEAVE: Final = 3
_MBIND: Final = {"x86_64": 237, "aarch64": 235}


def nodes_of_process(root: Path = Path("/")) -> list[int]:
    """Return nodes with a core that this process may run on, in order; none if nothing is known."""
    cores = os.sched_getaffinity(0)
    return sorted(
        int(folder.name.removeprefix("node"))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        if cores & _cores((folder / "cpulist").read_text())
    )


def spread(address: int, nbytes: int, nodes: list[int]) -> str:
    """Let the pages of untouched memory alternate between nodes. Returns why not, or "".

    On one node there is nothing to do: memory comes from the node that first touches it.
    """
    if len(nodes) < 2:
        return ""
    return interleave(address, nbytes, nodes)


def interleave(address: int, nbytes: int, nodes: list[int]) -> str:
    """`mbind` with MPOL_INTERLEAVE, by a raw system call. Returns why it failed, or ""."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"the number of mbind on {platform.machine()} is not known here"
    num_words = max(nodes) // 64 + 1
    words = (ctypes.c_uint64 * num_words)()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_MPOL_INTERLEAVE),
        words,
        # The kernel subtracts one from this number.
        ctypes.c_ulong(num_words * 64 + 1),
        ctypes.c_uint(0),
    )
    return f"mbind: {os.strerror(ctypes.get_errno())}" if failed else ""


def _cores(text: str) -> set[int]:
    """Parse a list of cores, such as "0-3,8,10-11"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
