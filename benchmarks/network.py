"""Two nodes on one machine: network namespaces, joined by a cable of a given rate. Linux, root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INTERFACE: Final = "zero0"  # of either node
BURST_KB: Final = 256  # most bytes that are sent at once
LATENCY_MS: Final = 50  # packets that wait longer are dropped


@dataclass(frozen=True)
class Node:
    """One end of the cable."""

    name: str

    @property
    def launcher(self) -> list[str]:
        """Return the words to put before a command, so that it runs on this node."""
        return ["ip", "netns", "exec", self.name]

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that make gloo use the cable."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}

    def sent_bytes(self) -> int:
        """Return the bytes that the node has sent so far, as the kernel counts them."""
        return int(_run(*self.launcher, "cat", f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"))


def why_not() -> str:
    """Return the reason why this machine cannot have two nodes; empty if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"it needs {' and '.join(missing)} (iproute2)"
    if not Path("/proc/self/ns/net").exists():
        return "this system has no network namespaces"
    return "" if os.geteuid() == 0 else "it needs root, to make network namespaces"


@contextmanager
def two_nodes(gbit_per_s: float) -> Iterator[tuple[Node, Node]]:
    """Create two namespaces, joined by a cable with this rate in each direction."""
    nodes = Node(f"zero-{os.getpid()}-0"), Node(f"zero-{os.getpid()}-1")
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.name)
        first, second = nodes
        ends = ["netns", first.name, "type", "veth", "peer", "name", INTERFACE]
        _run("ip", "link", "add", INTERFACE, *ends, "netns", second.name)
        for number, node in enumerate(nodes, start=1):
            inside = (*node.launcher, "ip")
            _run(*inside, "address", "add", f"10.231.0.{number}/24", "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "up")
            _run(*inside, "link", "set", "lo", "up")
            shaped = ["rate", f"{gbit_per_s * 1000:.0f}mbit", "burst", f"{BURST_KB}kb"]
            where = [*node.launcher, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf"]
            _run(*where, *shaped, "latency", f"{LATENCY_MS}ms")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.name], check=False, capture_output=True)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
