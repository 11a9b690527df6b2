"""How many ranks exchange what, without any groups: what `Wire.routes` comes to. Planning only."""

from __future__ import annotations

from attrs import frozen
from zero_comm import Levels

from ._errors import PartitionError
from ._wire import Wire


@frozen(kw_only=True)
class RoutePlan:
    """Sizes of a model's groups; ranks of a node follow each other."""

    whole: int  # ranks that train it
    shards: int  # over which it is sharded
    replicas: int = 1  # that have the same shards
    node: int | None = None  # ranks that keep a copy of gathered values together
    ranks_per_node: int | None = None  # None: all are of one node, as far as is known

    @classmethod
    def of(cls, wire: Wire, world_size: int, ranks_per_node: int | None = None) -> RoutePlan:
        """What this wire means for so many ranks.

        Args:
            wire: As for `partition`.
            world_size: Ranks that train the model.
            ranks_per_node: Where `wire.levels` does not say it.

        Raises:
            PartitionError: Nodes have one rank, or there is no whole number of them.
        """
        levels = wire.levels
        size = levels.inside.world_size if isinstance(levels, Levels) else levels
        size = ranks_per_node if size is None else size
        if size is None and (wire.secondary or wire.replicas):
            raise PartitionError(
                "Wire(secondary=True) and Wire(replicas=True) are for several nodes: say how many "
                "ranks one has, by Wire(levels=...) or ranks_per_node"
            )
        if size is not None and world_size % size:
            raise PartitionError(
                f"expected a whole number of nodes, got {world_size} ranks and {size} of them to a "
                "node"
            )
        num_nodes = 1 if size is None else world_size // size
        if wire.replicas and size is not None and num_nodes > 1:
            return cls(whole=world_size, shards=size, replicas=num_nodes, ranks_per_node=size)
        node = size if wire.secondary and num_nodes > 1 else None
        if node == 1:
            raise PartitionError(
                "Wire(secondary=True) with one rank to a node would keep all parameters whole on "
                "it; use stage 2, which does so without a gather"
            )
        return cls(whole=world_size, shards=world_size, node=node, ranks_per_node=size)

    @property
    def num_nodes(self) -> int:
        """How many there are, as far as is known."""
        return 1 if self.ranks_per_node is None else self.whole // self.ranks_per_node

    def shard_of(self, rank: int) -> int:
        """Position of a rank of the whole among those that share shards."""
        return rank % self.shards

    def nodes_of_shards(self, rank: int) -> tuple[int, ...]:
        """Node of each rank that shares shards with this one."""
        first = rank - self.shard_of(rank)
        size = self.ranks_per_node or self.whole
        return tuple(other // size for other in range(first, first + self.shards))
