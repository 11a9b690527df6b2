"""How many ranks exchange what, as `Routes` will have them: arithmetic only."""

from __future__ import annotations

from attrs import frozen
from zero_comm import AbstractCodec, Levels

from ._buffer_plan import BufferPlan
from ._errors import PartitionError
from ._placement import Placement
from ._wire import AS_ONE, Wire


@frozen(kw_only=True)
class PlannedRoutes:
    """Sizes of a model's groups."""

    whole: int  # ranks that train it
    shards: int  # of them, those over which it is sharded: all, or those of a replica
    per_node: int  # of them, those of one node
    has_secondary: bool = False  # whether nodes keep what they have gathered
    reads_peers: bool = False  # whether shards are read without their owners
    wire: Wire = AS_ONE  # in how many bits

    @property
    def num_replicas(self) -> int:
        """How many ranks have the same shard."""
        return self.whole // self.shards

    def codec_of(self, buffer: BufferPlan) -> AbstractCodec | None:
        """In which shards of a buffer that rests sharded travel; None: as they are."""
        codec = self.resting_codec_of(buffer) or self.wire.params
        is_encoded = self.shards > 1 and codec is not None and codec.takes(buffer.dtype)
        return codec if is_encoded else None

    def resting_codec_of(self, buffer: BufferPlan) -> AbstractCodec | None:
        """In which they rest, if the buffer's parameters rest sharded; None: as they are."""
        return self.wire.frozen if self.wire.rests_encoded(buffer, Placement.SHARDED) else None

    def shard_rank(self, rank: int) -> int:
        """Which shard a rank of the whole keeps."""
        return rank % self.shards

    def replica(self, rank: int) -> int:
        """Which replica a rank of the whole is of; the first one's shards are saved."""
        return rank // self.shards


def plan_routes(
    wire: Wire = AS_ONE,
    *,
    world_size: int,
    ranks_per_node: int | None = None,
    reads_peers: bool = False,
) -> PlannedRoutes:
    """What `Wire.routes` will make of so many ranks. Local.

    Args:
        wire: As for `partition`.
        world_size: Number of ranks.
        ranks_per_node: Neighbours in rank order that share a node, where the wire does not say; all
            do when None.
        reads_peers: Whether ranks of one node read each other's shards.

    Raises:
        PartitionError: The wire needs nodes and nobody says how large they are, or two different
            sizes are said, or one that does not divide the ranks or is too small.
    """
    per_node = wire.levels.inside.world_size if isinstance(wire.levels, Levels) else wire.levels
    if per_node is not None and ranks_per_node not in (None, per_node):
        raise PartitionError(
            f"expected nodes of {per_node} ranks, as Wire.levels says, got ranks_per_node="
            f"{ranks_per_node}; give one of them"
        )
    needs_levels = wire.secondary or wire.replicas or wire.gradients is not None
    has_levels = per_node is not None or needs_levels
    per_node = per_node or ranks_per_node
    if per_node is None and has_levels and world_size > 1:
        raise PartitionError(
            "a plan of this Wire needs to know how many ranks make a node, which torchrun says in "
            "training; pass ranks_per_node, or Wire(levels=...)"
        )
    per_node = world_size if per_node is None or world_size == 1 else per_node
    if world_size % per_node:
        raise PartitionError(f"expected nodes of {per_node} ranks to divide {world_size} ranks")
    has_nodes = per_node < world_size
    if wire.secondary and has_nodes and per_node == 1:
        raise PartitionError(
            "Wire(secondary=True) with one rank to a node would keep all parameters whole on it; "
            "use stage 2"
        )
    return PlannedRoutes(
        whole=world_size,
        shards=per_node if wire.replicas and has_nodes else world_size,
        per_node=per_node,
        has_secondary=wire.secondary and has_nodes,
        # Levels are believed: ranks of different nodes do not read each other's shards.
        reads_peers=reads_peers
        and wire.params is None
        and (not (has_levels and has_nodes) or wire.replicas),
        wire=wire,
    )
