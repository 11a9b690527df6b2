"""Flat buffers of a sharded model, and where their shards are stored.

A unit's parameters are laid out in flat buffers, each of which is cut into one shard per rank. A
`FlatBuffer` (`flat_buffer`) has the parameters of one buffer and this rank's shard of it, and makes
parameters and shards views of flat memory. A `Store` (`store`) is where the shard's values are: in
device memory, rounded from masters, encoded, offloaded, or in offloaded optimizer state. `seams`
has the protocols that offload implements, without knowing who does.

Nothing here knows a stage or a schedule, or communicates but through handles of `zero_comm`. Read
flat_buffer.py first. What must never happen: a parameter's object changes, or its shard moves to
another address while a view of it is in use.
"""
