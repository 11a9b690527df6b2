"""Processes of one host that read each other's memory in place of sending messages.

`meet` is the door: ranks of a gloo group that see each other for the first time find out whether
all run on one host and may read each other. If so, the group's exchanges are `Reads`, else
`Messages`; everything above calls either the same way. A rank then

1. offers its buffer in its `Journal`, which peers read (`journal`);
2. carries out a transfer once all peers have offered theirs, in any wait (`peer_memory`);
3. copies out of a peer's buffer by one system call (`process_memory`).

`SharedShards` needs no journal: a rank's shards lie where peers know them, and two words say which
version may be read and which one this rank reads no more (`shards`).

Read `peer_memory` first. A buffer must never be written, or freed, before every peer has read it;
a process that ends waits for those that still read its shards.
"""

from .meeting import meet

__all__ = ["meet"]
