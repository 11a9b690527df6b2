"""Which ranks exchange what: a choice beside the stage, and the groups that follow from it."""

from __future__ import annotations

from typing import Any, Final

from attrs import Attribute, evolve, field, frozen
from zero_comm import Group, Levels, TrafficLog

from ._errors import PartitionError
from ._placement import Placement, Placements


def _is_levels(_: Wire, attribute: Attribute, value: Any) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is not None and not is_number and not isinstance(value, Levels):
        raise PartitionError(
            f"Wire.levels: expected zero_comm.Levels, the number of ranks of a node, or None, got "
            f"{value!r}"
        )


def _is_flag(_: Wire, attribute: Attribute, value: Any) -> None:
    if not isinstance(value, bool):
        raise PartitionError(f"Wire.{attribute.name}: expected True or False, got {value!r}")


def _excludes_secondary(wire: Wire, _: Attribute, replicas: bool) -> None:
    if replicas and wire.secondary:
        raise PartitionError(
            "Wire(secondary=True, replicas=True): with replicas a node has all shards, and every "
            "gather is local already; leave out secondary"
        )


@frozen(kw_only=True)
class Wire:
    """How values travel between ranks. The same on every rank.

    Args:
        levels: Which ranks are near each other: `Levels`, or so many consecutive ranks make a node.
            None: what torchrun says, where something below asks for it.
        secondary: Stage 3: each node keeps a copy of what was gathered, in parts, until the values
            change. A gather of the same values, as in backward, then stays inside the node. Costs a
            node's share of the parameters on each rank; moves nothing where all ranks are of one
            node. (ZeRO++ calls it hpZ, arXiv 2306.10209.)
        replicas: Stages 1 to 3: shards are those of a node, and each node has all of them; gradient
            shards are reduced inside a node and then averaged over the nodes. Costs the memory of
            as many ranks as a node has, and no gather leaves it. What a rank writes to its own part
            (`set_local_param`) must be the same on the ranks of other nodes that have that part.
            (MiCS, arXiv 2205.00119; hybrid sharding.)

    Raises:
        PartitionError: Names the field, what was expected and what came.
    """

    levels: Levels | int | None = field(default=None, validator=_is_levels)
    secondary: bool = field(default=False, validator=_is_flag)
    replicas: bool = field(default=False, validator=[_is_flag, _excludes_secondary])

    def routes(self, group: Group, *, timeout_s: float = 60.0) -> Routes:
        """The groups that follow for a model that all ranks of `group` train. Collective.

        Raises:
            PartitionError: `levels` are of another group, or nodes have one rank.
            zero_comm.GroupMismatchError: The group is no whole number of nodes.
        """
        log = TrafficLog()
        routes = self._routes(group, timeout_s=timeout_s)
        groups = {id(each): evolve(each, log=log) for each in routes.groups}

        def logged(group: Group | None) -> Any:
            return None if group is None else groups[id(group)]

        return Routes(
            logged(routes.whole),
            logged(routes.shards),
            logged(routes.replicas),
            logged(routes.node),
            log,
        )

    def _routes(self, group: Group, *, timeout_s: float) -> Routes:
        levels = self.levels
        if isinstance(levels, Levels):
            if levels.whole.process_group is not group.process_group:
                raise PartitionError(
                    f"Wire.levels: expected levels of the group that the model is given, of "
                    f"{group.world_size} ranks, got levels of another of "
                    f"{levels.whole.world_size} (rank {group.rank}); pass Levels.of_nodes(group), "
                    "or the number of ranks of a node"
                )
        elif levels is not None or self.secondary or self.replicas:
            levels = Levels.of_nodes(group, levels, timeout_s=timeout_s)
        if levels is None:
            return Routes(group, group)
        has_nodes = levels.num_nodes > 1
        if self.replicas and has_nodes:
            return Routes(levels.whole, levels.inside, replicas=levels.across)
        node = levels.inside if self.secondary and has_nodes else None
        if node is not None and node.world_size == 1:
            raise PartitionError(
                "Wire(secondary=True) with one rank to a node would keep all parameters whole on "
                "it; use stage 2, which does so without a gather, or say with Wire(levels=...) how "
                f"many ranks are near each other (rank {group.rank} of {group.world_size})"
            )
        return Routes(levels.whole, levels.whole, node=node)

    def check(self, placements: Placements) -> None:
        """Raise PartitionError for what these placements leave nothing to do for. Local."""
        if self.secondary and placements.params is Placement.REPLICATED:
            raise PartitionError(
                "Wire(secondary=True) is for parameters that are gathered, and these rest whole at "
                "stages 0 to 2; use stage 3, or leave it out"
            )
        if self.replicas and placements.optim is Placement.REPLICATED:
            raise PartitionError(
                "Wire(replicas=True) is for what is sharded, and at stage 0 every rank is a "
                "replica; use stage 1, 2 or 3, or leave it out"
            )

    def facts(self, routes: Routes) -> dict[str, str]:
        """What ranks must agree on."""
        return {
            "wire": f"secondary={self.secondary}, replicas={self.replicas}",
            "ranks that share shards": str(routes.shards.world_size),
        }


@frozen(eq=False)
class Routes:
    """Groups of one model."""

    whole: Group  # all ranks that train it
    shards: Group  # those over which it is sharded: all, or those of a replica
    replicas: Group | None = None  # those with the same shards as this rank
    node: Group | None = None  # those that keep a copy of gathered values together
    log: TrafficLog = field(factory=TrafficLog)  # of what this rank sends in all of them; by steps

    @property
    def groups(self) -> tuple[Group, ...]:
        """All of them, each once."""
        optional = tuple(group for group in (self.replicas, self.node) if group is not None)
        return (self.whole, *(() if self.shards is self.whole else (self.shards,)), *optional)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's shards are the ones that count as the model's, in a file say."""
        return self.replicas is None or self.replicas.rank == 0


AS_ONE: Final = Wire()
