"""Groups in which ranks exchange values, and their codecs: a choice beside the stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import Attribute, evolve, field, frozen
from zero_comm import (
    AbstractCodec,
    AnyRanks,
    Cast,
    CodecError,
    Group,
    Levels,
    Loco,
    Traffic,
    parse_codec,
)

from zero_partition.errors import PartitionError

from .layout import BufferPlan
from .stages import Placement, Placements, expects, is_whole_number, names_fields

_LEVELS: Final = expects(
    "zero_comm.Levels, the number of ranks of a node, or None",
    lambda value: value is None or isinstance(value, Levels) or is_whole_number(value, 1),
)
_FLAG: Final = expects("True or False", lambda value: isinstance(value, bool))
_CODEC: Final = expects(
    "a codec of zero_comm, its name, such as 'int8', or None",
    lambda value: value is None or isinstance(value, AbstractCodec),
)
_LOCO: Final = expects("a zero_comm.Loco or None", lambda v: v is None or isinstance(v, Loco))


def _as_codec(value: Any) -> Any:
    try:
        return parse_codec(value) if isinstance(value, str) else value
    except CodecError as error:
        raise PartitionError(f"Wire: {error}") from error


def _can_feed_back(wire: Wire, _: Attribute, loco: Loco | None) -> None:
    if loco is None:
        return
    if wire.gradients is None:
        raise PartitionError(
            "Wire(loco=...) feeds back what encoding gradients loses, and these travel as they "
            "are; say how they are encoded, as in Wire(gradients='int4', loco=Loco())"
        )
    if wire.replicas:
        raise PartitionError(
            "Wire(loco=..., replicas=True): with replicas the second reduction, across nodes, ends "
            "on every one of them, and has no feedback; leave out loco, or replicas"
        )


def _excludes_secondary(wire: Wire, _: Attribute, replicas: bool) -> None:
    if replicas and wire.secondary:
        raise PartitionError(
            "Wire(secondary=True, replicas=True): with replicas a node has all shards, and every "
            "gather is local already; leave out secondary"
        )


@names_fields
@frozen(kw_only=True)
class Wire:
    """Choices of how values travel between ranks. The same on every rank.

    Codecs are those of zero_comm or their names: "int8", "int4", "bf16", "int8:128" (its block).
    What a codec does not take (float64, integers) travels as it is, as does everything in a group
    of one rank.

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
        params: Stages 1 to 3: how shards are written in the gathers of units. Every rank, the owner
            too, computes with what it decodes; the shards themselves stay exact, and so does what
            is stepped, saved and given by request (`full_param`, `GatheredParameters`). A node's
            copy (`secondary`) is of decoded values. Single parameters that are used outside their
            unit travel as they are, after they are rounded alike. (ZeRO++ calls it qwZ.)
            At stages 1 and 2 the parameters that a step has updated are gathered, so frozen ones
            stay exact. Exact shards are then kept beside the replicated parameters, unless there
            are masters on the device: that costs the bytes of a shard. As at stage 3,
            `model.state_dict()` gathers or raises. Values written to replicated parameters in place
            stay until the next step; loaded values are rounded alike when the model's forward next
            runs. Small parameters that are replicated at stage 3 are not encoded.
        gradients: Stages 1 to 3: how gradients are written while they are reduced, in two hops:
            each rank's inside its node, then the node's sums, encoded anew, across nodes. One hop
            where there is one node, or one rank to a node. Sums are taken in float32. With
            `replicas`, the mean over nodes is encoded once more, as a result. (qgZ)
        frozen: Stage 3: how shards of parameters that do not train are stored, and sent as they are
            stored. Values are rounded once, when they are sharded or loaded; the rounded values are
            given by request and saved. For the model under adapters. Not for offloaded shards.
        loco: What encoding gradients loses is fed back in the next reduction; costs memory, see
            `Loco`. Saved with the optimizer's state, and restored on as many ranks, with the same
            levels, units and codec; otherwise training that continues from a file starts without.

    Raises:
        PartitionError: Names the field, what was expected and what came.
    """

    levels: Levels | int | None = field(default=None, validator=_LEVELS)
    secondary: bool = field(default=False, validator=_FLAG)
    replicas: bool = field(default=False, validator=[_FLAG, _excludes_secondary])
    params: AbstractCodec | None = field(default=None, converter=_as_codec, validator=_CODEC)
    gradients: AbstractCodec | None = field(default=None, converter=_as_codec, validator=_CODEC)
    frozen: AbstractCodec | None = field(default=None, converter=_as_codec, validator=_CODEC)
    loco: Loco | None = field(default=None, validator=[_LOCO, _can_feed_back])

    def routes(self, group: Group, *, timeout_s: float = 60.0) -> Routes:
        """Return the groups of a model that all ranks of `group` train. Collective.

        Raises:
            PartitionError: `levels` are of another group, or nodes have one rank.
            zero_comm.GroupMismatchError: The group is no whole number of nodes.
        """
        log = [Traffic()]
        levels = self._levels_of(group, timeout_s)
        if levels is None:
            group = evolve(group, log=log)
            return Routes(group, group, log=log)
        groups = (levels.whole, levels.inside, levels.across)
        levels = Levels(*(evolve(each, log=log) for each in groups))
        has_nodes = levels.num_nodes > 1
        if self.replicas and has_nodes:
            return Routes(levels.whole, levels.inside, replicas=levels.across, log=log)
        node = levels.inside if self.secondary and has_nodes else None
        if node is not None and node.world_size == 1:
            raise PartitionError(
                "Wire(secondary=True) with one rank to a node would keep all parameters whole on "
                "it; use stage 2, which does so without a gather, or say with Wire(levels=...) how "
                f"many ranks are near each other (rank {group.rank} of {group.world_size})"
            )
        hops = None if self.gradients is None else levels
        return Routes(levels.whole, levels.whole, node=node, hops=hops, log=log)

    def _levels_of(self, group: Group, timeout_s: float) -> Levels | None:
        levels = self.levels
        if not isinstance(levels, Levels):
            is_needed = self.secondary or self.replicas or self.gradients is not None
            is_asked_for = levels is not None or is_needed
            return Levels.of_nodes(group, levels, timeout_s=timeout_s) if is_asked_for else None
        if levels.whole.process_group is not group.process_group:
            raise PartitionError(
                f"Wire.levels: expected levels of the group that the model is given, of "
                f"{group.world_size} ranks, got levels of another of "
                f"{levels.whole.world_size} (rank {group.rank}); pass Levels.of_nodes(group), "
                "or the number of ranks of a node"
            )
        return levels

    def check(self, placements: Placements, *, offloads_params: bool = False) -> None:
        """Raise PartitionError if a field has no use with these placements. Local.

        Args:
            placements: Of parameters, gradients and optimizer state.
            offloads_params: Whether shards of parameters are offloaded.
        """
        if self.frozen is not None and offloads_params:
            raise PartitionError(
                f"Wire(frozen='{self.frozen}') is for shards on the device, and these are "
                "offloaded, unencoded; keep parameters on the device, or leave out frozen"
            )
        if self.secondary and placements.params is Placement.REPLICATED:
            raise PartitionError(
                "Wire(secondary=True) is for parameters that are gathered, and these are "
                "replicated at stages 0 to 2; use stage 3, or leave it out"
            )
        if self.replicas and placements.optim is Placement.REPLICATED:
            raise PartitionError(
                "Wire(replicas=True) is for what is sharded, and at stage 0 every rank is a "
                "replica; use stage 1, 2 or 3, or leave it out"
            )
        if self.params is not None and placements.optim is Placement.REPLICATED:
            raise PartitionError(
                f"Wire(params='{self.params}') is for parameters that are gathered, and at stage 0 "
                "every rank updates all of them; use stage 1, 2 or 3, or leave it out"
            )
        if self.frozen is not None and placements.params is Placement.REPLICATED:
            raise PartitionError(
                f"Wire(frozen='{self.frozen}') is for shards of parameters, and at stages 0 to 2 "
                "these are replicated; use stage 3, or leave it out"
            )
        if self.gradients is not None and placements.optim is Placement.REPLICATED:
            raise PartitionError(
                f"Wire(gradients='{self.gradients}') is for gradients that are reduced into "
                "shards, and at stage 0 they are all-reduced, so that each rank has all of every "
                "gradient; use stage 1, which gives the same numbers with less memory, or leave it "
                "out"
            )

    def stores_encoded(self, plan: BufferPlan, placement: Placement) -> bool:
        """Return whether shards of a buffer with this placement are stored encoded."""
        is_frozen = placement is Placement.SHARDED and not plan.trainable
        return is_frozen and self.frozen is not None and self.frozen.takes(plan.dtype)

    def codec_of_updates(
        self, plan: BufferPlan, placement: Placement, *, is_small: bool, num_shards: int
    ) -> AbstractCodec | None:
        """Return the codec of gathers of updated shards into a replicated buffer; None: exact.

        Args:
            plan: Of the buffer.
            placement: Of its parameters.
            is_small: Whether they are replicated at stage 3 too.
            num_shards: Number of ranks that exchange them.
        """
        is_gathered = placement is Placement.REPLICATED and plan.trainable and not is_small
        is_encoded = is_gathered and self.params is not None and self.params.takes(plan.dtype)
        return self.params if is_encoded and num_shards > 1 else None

    def codec_of_params(self, plan: BufferPlan, num_shards: int) -> AbstractCodec | None:
        """Return the codec of gathers of sharded parameters over so many ranks; None: exact."""
        codec = self.params
        if codec is None and plan.travel is not None:
            codec = Cast(plan.travel)
        is_encoded = num_shards > 1 and codec is not None and codec.takes(plan.dtype)
        return codec if is_encoded else None

    def codec_of_gradients(self, dtype: torch.dtype) -> AbstractCodec | None:
        """Return the codec in which gradients of this dtype travel; None: as they are."""
        is_encoded = self.gradients is not None and self.gradients.takes(dtype)
        return self.gradients if is_encoded else None

    def facts(self, routes: Routes) -> dict[str, str]:
        """Return the facts on which ranks must agree, by name."""
        return {
            "wire": f"secondary={self.secondary}, replicas={self.replicas}, params={self.params}, "
            f"gradients={self.gradients}, frozen={self.frozen}, loco={self.loco}",
            "ranks that share shards": str(routes.shards.world_size),
        }


@frozen
class OwnRanks:
    """Ranks with the same experts as this one: one of the groups that divide a model's ranks."""

    # Positions among all ranks of the model.
    positions: tuple[int, ...]
    # Number of this group, in the order of the groups' first ranks.
    index: int
    # Whether there are other parameters of the same names in each group.
    shares_names: bool


@frozen(eq=False)
class Routes:
    """Groups in which ranks communicate for one model."""

    # All ranks that train the model, and those over which it is sharded: all, or one replica.
    whole: Group
    shards: Group
    # Ranks with the same shards as this one.
    replicas: Group | None = None
    # Ranks that keep a copy of gathered values together.
    node: Group | None = None
    # Levels in which encoded gradients are reduced, if not among `shards`.
    hops: Levels | None = None
    # Ranks that have the other parts of DTensors, if the model has any.
    parts: Group | None = None
    # All ranks of the model, where `whole` has only a part of it.
    grid: Group | None = None
    # Pattern -> groups of the parameters with ranks of their own; for those, `own` says which.
    of_groups: Mapping[str, Routes] = field(factory=dict)
    own: OwnRanks | None = None
    # Names of parameters that only other ranks have.
    names_on_other_ranks: frozenset[str] = frozenset()
    # Traffic of this rank in all groups: in the last complete step, if there is one, and since.
    log: list[Traffic] = field(factory=lambda: [Traffic()])

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return every group, each once."""
        hops = () if self.hops is None else (self.hops.inside, self.hops.across)
        every = (self.whole, self.shards, self.replicas, self.node, self.parts, self.grid, *hops)
        own = chain.from_iterable(routes.groups for routes in self.of_groups.values())
        found = (group for group in (*every, *own) if group is not None)
        return tuple({id(group): group for group in found}.values())

    def of(self, plan: BufferPlan) -> Routes:
        """Return the groups of the parameters in a buffer."""
        return self.of_groups[plan.ranks] if plan.ranks else self

    def whole_of(self, pattern: str) -> Group:
        """Return all ranks of parameters that match a pattern of `of_groups`; "": the model's."""
        return self.of_groups[pattern].whole if pattern else self.whole

    @property
    def holders(self) -> tuple[Group, ...]:
        """Groups that have all shards of all parts, reached by one after the other."""
        if self.own is not None and self.grid is not None:
            # Each rank has a shard of this expert, or of another one.
            return (self.grid,)
        return (self.shards,) if self.parts is None else (self.shards, self.parts)

    @property
    def others(self) -> tuple[Group, ...]:
        """Return groups whose ranks have other gradients than this one, at stage 0."""
        apart = self.grid if self.own is not None else self.parts
        apart = self.whole if self.of_groups else apart
        return () if apart is None else (apart,)

    @property
    def all_ranks(self) -> Group:
        """Return the ranks that together have all of the model, and that save and load it."""
        return self.whole if self.grid is None else self.grid

    @property
    def position(self) -> int:
        """Return this rank's number among all of them, whatever the order of their meshes."""
        index = 0 if self.parts is None else self.parts.rank
        return index * self.whole.world_size + self.whole.rank

    @property
    def num_parts(self) -> int:
        """Return how many parts DTensors have."""
        return 1 if self.parts is None else self.parts.world_size

    @property
    def is_first_replica(self) -> bool:
        """Return whether this rank's shards count as the model's, as in files: one replica's do."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def is_first_part(self) -> bool:
        """Return whether this rank's values count, of those that the ranks of all parts have."""
        return self.parts is None or self.parts.rank == 0


def pattern_of(name: str, patterns: Collection[str]) -> str:
    """Return the first pattern that matches the name of a parameter or a buffer; "" for none."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")


AS_ONE: Final = Wire()


def whole_of(ranks: AnyRanks) -> Group:
    """Return the group of all ranks that train a model. Collective as `ranks_of`."""
    return ranks_of(ranks)[0]


def ranks_of(
    ranks: AnyRanks, wire: Wire = AS_ONE, placements: Placements | None = None
) -> tuple[Group, Wire]:
    """Return the group of all ranks that train a model, and how values travel among them.

    Collective among these the first time, and local afterwards.

    Args:
        ranks: A Group, a ProcessGroup, or a DeviceMesh: of one dimension, over which is sharded; or
            of two, of which the first has replicas and the second shards, as `fully_shard` reads
            it. Of the latter `Wire.replicas` follows, except at stage 0.
        wire: As it was asked for.
        placements: Of the stage; None where only the group is asked for.

    Raises:
        PartitionError: A mesh has more dimensions, or `wire` has levels of its own.
        zero_comm.CommError: It is none of these, or this rank is not among them.
        zero_comm.GroupMismatchError: The ranks of a mesh are not in the order of the job.
    """
    if not isinstance(ranks, dist.DeviceMesh) or ranks.ndim == 1:
        return Group.of(ranks), wire
    planned = wire_of(ranks, wire, placements)
    levels = Levels.from_mesh(ranks)
    return levels.whole, planned if planned is wire else evolve(planned, levels=levels)


def wire_of(mesh: dist.DeviceMesh, wire: Wire, placements: Placements | None = None) -> Wire:
    """Return how values travel among the ranks of a mesh, without making a group. Local.

    Raises:
        PartitionError: As `ranks_of` does.
    """
    if mesh.ndim > 2:
        raise PartitionError(
            "expected a DeviceMesh of one dimension, over which to shard, or of two, replicas "
            f"outside and shards inside, got {mesh}; choose them by name, as in mesh['shard'] or "
            "mesh['replicate', 'shard']"
        )
    if mesh.ndim == 1 or placements is None or placements.optim is Placement.REPLICATED:
        return wire
    if wire.levels is not None:
        raise PartitionError(
            f"expected a DeviceMesh of two dimensions or Wire(levels=...), got both, {mesh} and "
            f"{wire.levels}; leave one of them out"
        )
    return evolve(wire, levels=mesh.size(1), replicas=True)


@frozen(kw_only=True)
class PlannedRoutes:
    """Sizes of a model's groups."""

    # Ranks that train it; those over which it is sharded, all or one replica; those of one node.
    whole: int
    shards: int
    per_node: int
    # Whether nodes keep a copy of what they have gathered.
    has_secondary: bool = False
    # Whether shards are read without their owners.
    reads_peers: bool = False
    wire: Wire = AS_ONE
    # Pattern -> sizes for parameters with ranks of their own, whose `positions` are in the whole.
    of_groups: Mapping[str, PlannedRoutes] = field(factory=dict)
    positions: tuple[int, ...] = ()

    def of(self, plan: BufferPlan) -> PlannedRoutes:
        """Return the sizes of the groups of the parameters in a buffer."""
        return self.of_groups[plan.ranks] if plan.ranks else self

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the node of each rank over which it is sharded."""
        ranks = self.positions or range(self.shards)
        return tuple(rank // self.per_node for rank in ranks)

    @property
    def num_replicas(self) -> int:
        """Return how many ranks have the same shard."""
        return self.whole // self.shards

    def codec_of(self, buffer: BufferPlan) -> AbstractCodec | None:
        """Return the codec in which shards of a sharded buffer travel; None: as they are."""
        storage_codec = self.storage_codec_of(buffer) if self.shards > 1 else None
        return storage_codec or self.wire.codec_of_params(buffer, self.shards)

    def storage_codec_of(self, buffer: BufferPlan) -> AbstractCodec | None:
        """Return the codec in which shards of a sharded buffer are stored; None: as they are."""
        return self.wire.frozen if self.wire.stores_encoded(buffer, Placement.SHARDED) else None

    def shard_rank(self, rank: int) -> int:
        """Return which shard a rank of the whole keeps."""
        return self.positions.index(rank) if self.positions else rank % self.shards

    def replica(self, rank: int) -> int:
        """Return which replica a rank of the whole is of; the first one's shards are saved."""
        return 0 if self.positions else rank // self.shards


def plan_routes(
    wire: Wire = AS_ONE,
    *,
    world_size: int,
    ranks_per_node: int | None = None,
    reads_peers: bool = False,
) -> PlannedRoutes:
    """Return the sizes of the groups that `Wire.routes` makes of so many ranks. Local.

    Args:
        wire: As for `partition`.
        world_size: Number of ranks.
        ranks_per_node: Neighbours in rank order that share a node, where the wire does not say; all
            do when None.
        reads_peers: Whether ranks of one node read each other's shards.

    Raises:
        PartitionError: The wire needs nodes and their size is not given, or two different sizes are
            given, or one that does not divide the ranks or is too small.
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
        # Levels are taken as given: ranks of different nodes do not read each other's shards.
        reads_peers=reads_peers
        and wire.params is None
        and (not (has_levels and has_nodes) or wire.replicas),
        wire=wire,
    )
