"""Parameters with ranks of their own, such as experts: which they are, and who has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn
from zero_comm import AnyRanks, Group, all_gather_json, check_agreement

from zero_partition.dtensors import has_parts
from zero_partition.errors import PartitionError
from zero_partition.optimizer.shards import describe_states
from zero_partition.plan.config import PartitionConfig
from zero_partition.plan.layout import UnitPlan
from zero_partition.plan.wire import OwnRanks, PlannedRoutes, Routes, Wire, pattern_of
from zero_partition.run.sharded_model import ShardedModel


def find_ranks(
    model: nn.Module, patterns: Collection[str], optimizer: torch.optim.Optimizer | None
) -> dict[int, str]:
    """Return the pattern that matches a parameter, by id, where one does. Local.

    Raises:
        PartitionError: A pattern matches no parameter, or two match names of one; or a parameter is
            marked as an expert of this rank (`allreduce` is False, or its param group has `moe` =
            True) and no pattern matches it.
    """
    of_experts = [group for group in getattr(optimizer, "param_groups", ()) if group.get("moe")]
    in_groups = {id(param) for group in of_experts for param in group["params"]}
    found: dict[int, str] = {}
    names: dict[int, str] = {}
    used = set[str]()
    for name, param in model.named_parameters(remove_duplicate=False):
        pattern, first = pattern_of(name, patterns), names.setdefault(id(param), name)
        used.add(pattern)
        if found.setdefault(id(param), pattern) != pattern:
            raise PartitionError(
                f"groups: parameter {first!r} is tied to {name!r}, and would have the ranks of "
                f"{found[id(param)] or 'the model'!r} and of {pattern or 'the model'!r}; name both "
                "in one pattern"
            )
        is_marked = getattr(param, "allreduce", True) is False or id(param) in in_groups
        if not pattern and is_marked:
            raise PartitionError(
                f"parameter {name!r} is marked as one that not all ranks have (allreduce=False, or "
                "moe=True in its param group), and belongs to no group: all ranks would get the "
                "values of the first. Name its ranks, as in ZeroConfig(groups={'*.experts.*': "
                "group}), where group has the ranks with the same experts as this one"
            )
    for pattern in patterns:
        if pattern not in used:
            raise PartitionError(
                f"groups: {pattern!r} matches no parameter; see model.named_parameters()"
            )
    return {key: pattern for key, pattern in found.items() if pattern}


def own_groups(config: PartitionConfig) -> dict[str, Group]:
    """Return the ranks of each pattern. Collective among each of these groups, the first time.

    Raises:
        zero_comm.CommError: It is no group, ProcessGroup or DeviceMesh of one dimension.
    """
    return {pattern: Group.of(ranks) for pattern, ranks in config.groups.items()}


def check_same_groups(sharded: ShardedModel | None, groups: Mapping[str, Group]) -> None:
    """Raise PartitionError where a model is sharded again with other groups. Local."""
    if sharded is None:
        return
    before = {pattern: own.whole for pattern, own in sharded.routes.of_groups.items()}
    are_same = all(
        pattern in groups and groups[pattern].process_group is group.process_group
        for pattern, group in before.items()
    )
    if not are_same:
        raise PartitionError(
            f"expected the groups with which this model was sharded, of {', '.join(before)}, got "
            f"{', '.join(groups) or 'none'} or other ranks; unshard() it first"
        )


def with_groups(
    routes: Routes,
    groups: Mapping[str, Group],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: PartitionConfig,
) -> tuple[Routes, dict[int, str]]:
    """Add the routes of parameters that have ranks of their own. Collective.

    A group of all ranks is the model's own, and is left out.

    Returns:
        All routes, and for each such parameter, by id, the pattern that has its ranks.

    Raises:
        PartitionError: The patterns do not fit the parameters, on any rank; the groups do not
            divide the ranks that train the model; or the configuration or the model has something
            that is not taken together with groups.
    """
    whole, problem, names = routes.whole, "", {pattern: list[str]() for pattern in groups}
    try:
        ranks_of = {}
        if groups or whole.world_size > 1:
            ranks_of = find_ranks(model, groups, optimizer)
        has_groups = any(group.world_size < whole.world_size for group in groups.values())
        _refuse_beside(model, config.wire, has_groups=has_groups)
    except PartitionError as error:
        problem, ranks_of = str(error), {}
    for name, param in model.named_parameters():
        if (pattern := ranks_of.get(id(param))) is not None:
            names[pattern].append(name)
    mine = [
        [pattern, group.positions_in(whole), names[pattern] if group.rank == 0 else []]
        for pattern, group in groups.items()
    ]
    by_rank = all_gather_json([problem, mine], group=whole, timeout_s=config.timeout_s)
    for rank, (theirs, _) in enumerate(by_rank):
        if problem or theirs:
            at = "" if problem else f" (on rank {rank}; seen on rank {whole.rank})"
            raise PartitionError((problem or theirs) + at)
    patterns = [[pattern for pattern, *_ in said] for _, said in by_rank]
    if any(other != patterns[0] for other in patterns):
        raise PartitionError(
            f"groups: expected the same patterns on every rank, got {patterns} by rank"
        )
    alike = dict[str, str]()
    found, elsewhere, first = dict[str, Routes](), set[str](), dict[Any, str]()
    for number, (pattern, group) in enumerate(groups.items()):
        said = [of_rank[number][1:] for _, of_rank in by_rank]
        _check_division(pattern, [positions for positions, _ in said], whole)
        every = {tuple(positions): of_first for positions, of_first in said if of_first}
        if len(every) == 1:
            continue
        own = tuple(said[whole.rank][0])
        shares_names = _share_names(pattern, [*every.values()], whole)
        elsewhere.update(set(chain.from_iterable(every.values())).difference(every[own]))
        if group.watch is not None and whole.watch is not None:
            group.watch.join(whole.watch, own)
        nodes = tuple(whole.nodes[position] for position in own) if whole.nodes else ()
        counted = evolve(group, log=routes.log, recorders=whole.recorders, nodes=nodes)
        ranks = OwnRanks(own, sorted(every).index(own), shares_names)
        found[pattern] = Routes(counted, counted, grid=whole, log=routes.log, own=ranks)
        division = tuple(tuple(positions) for positions, _ in said), shares_names
        # Equal divisions share flat buffers.
        alike[pattern] = first.setdefault(division, pattern)
    ranks_of = {key: alike[pattern] for key, pattern in ranks_of.items() if pattern in found}
    routes = evolve(routes, of_groups=found, names_on_other_ranks=frozenset(elsewhere))
    return routes, ranks_of


def plan_groups(
    routes: PlannedRoutes, model: nn.Module, config: PartitionConfig
) -> tuple[PlannedRoutes, dict[int, str]]:
    """Do what `with_groups` does, for a plan. Local: groups are those that this rank would have.

    Raises:
        PartitionError: The patterns do not fit the parameters; groups do not divide the ranks, or
            have ranks beyond them; or something else is not taken together with groups.
    """
    every = {pattern: _global_ranks(ranks) for pattern, ranks in config.groups.items()}
    ranks_of = find_ranks(model, every, None) if every else {}
    found, first = dict[str, PlannedRoutes](), dict[tuple[int, ...], str]()
    for pattern, ranks in every.items():
        if routes.whole % len(ranks) or max(ranks) >= routes.whole:
            raise PartitionError(
                f"groups[{pattern!r}]: expected ranks that are some of the {routes.whole} ranks of "
                f"the model, as many as divide these, got {[*ranks]}"
            )
        if len(ranks) < routes.whole:
            first.setdefault(ranks, pattern)
            size = len(ranks)
            own = evolve(routes, whole=size, shards=size, positions=ranks)
            found[pattern] = own
    _refuse_beside(model, config.wire, has_groups=bool(found))
    alike = {pattern: first[own.positions] for pattern, own in found.items()}
    ranks_of = {key: alike[pattern] for key, pattern in ranks_of.items() if pattern in alike}
    return evolve(routes, of_groups=found, reads_peers=routes.reads_peers and not found), ranks_of


def _global_ranks(ranks: AnyRanks) -> tuple[int, ...]:
    """Return the ranks of the job in a group, in order. Local."""
    if isinstance(ranks, dist.DeviceMesh):
        return tuple(sorted(ranks.mesh.flatten().tolist()))
    group = ranks.process_group if isinstance(ranks, Group) else ranks
    if group is None:
        return (dist.get_rank() if dist.is_initialized() else 0,)
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _share_names(pattern: str, by_group: Sequence[Sequence[str]], whole: Group) -> bool:
    """Return whether all groups have parameters of the same names; False if all are different.

    Raises:
        PartitionError: Some names are the same.
    """
    if all(names == by_group[0] for names in by_group):
        return True
    counted = Counter(chain.from_iterable(by_group))
    both, times = counted.most_common(1)[0]
    if times > 1:
        raise PartitionError(
            f"groups[{pattern!r}]: expected parameters of the same names in each group of ranks, "
            f"or of other names in each, got {both!r} in {times} of the {len(by_group)} (rank "
            f"{whole.rank}); number experts from 0 on each rank, or by their number among all"
        )
    return False


def _refuse_beside(model: nn.Module, wire: Wire, *, has_groups: bool) -> None:
    """Raise PartitionError for what is not supported together with groups. Local."""
    for is_there, what in (
        (wire.replicas, "Wire(replicas=True), or a mesh of two dimensions"),
        (wire.secondary, "Wire(secondary=True)"),
        (wire.loco is not None, "Wire(loco=...)"),
        (has_parts(model), "a model of DTensors"),
    ):
        if is_there and has_groups:
            raise PartitionError(
                f"expected {what} or ZeroConfig(groups=...), got both, which are not supported "
                "together; leave one of them out"
            )


def _check_division(pattern: str, by_rank: Sequence[Sequence[int]], whole: Group) -> None:
    """Raise PartitionError unless each rank is in one group, of as many ranks each."""
    for rank, positions in enumerate(by_rank):
        are_alike = len(positions) == len(by_rank[0]) and rank in positions
        if not are_alike or any(of < 0 or by_rank[of] != positions for of in positions):
            raise PartitionError(
                f"groups[{pattern!r}]: expected groups of as many ranks each that divide the "
                f"{whole.world_size} ranks of the model, got {[*by_rank]} by rank, -1 for a rank "
                f"that does not train it (rank {whole.rank})"
            )


def check_groups(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plans: Collection[UnitPlan],
    routes: Routes,
    *,
    ranks_of: Mapping[int, str],
    timeout_s: float,
) -> None:
    """Compare parameters with ranks of their own, their buffers and state, over those. Collective.

    Raises:
        zero_comm.AgreementError: Ranks with the same parameters have different ones.
    """
    for pattern, own in routes.of_groups.items():
        facts = describe_parameters(plans, pattern)
        for name, buffer in model.named_buffers():
            if pattern_of(name, routes.of_groups) == pattern:
                facts[f"buffer {name!r}"] = f"shape {tuple(buffer.shape)}, {buffer.dtype}"
        params = {key for key, ranks in ranks_of.items() if ranks == pattern}
        facts |= describe_states(optimizer, among=params.__contains__)
        check_agreement(facts, group=own.whole, timeout_s=timeout_s)


def describe_parameters(plans: Collection[UnitPlan], ranks: str) -> dict[str, str]:
    """Say what ranks that have the same parameters must agree on. Local.

    Args:
        plans: Of the units.
        ranks: See `BufferPlan`.
    """
    return {
        f"parameter {param.name!r}": f"shape {tuple(param.shape)}; {param.dtype}; "
        f"{'trainable' if param.trainable else 'frozen'}; unit {unit.name or '(model)'!r}; "
        f"cut {param.cut}"
        for unit in plans
        for buffer in unit.buffers
        if buffer.ranks == ranks
        for param in buffer.params
    }


def describe_others(plans: Collection[UnitPlan], of_groups: Mapping[str, Routes]) -> dict[str, str]:
    """Say what all ranks must agree on, of parameters that differ from rank to rank. Local.

    Names of such parameters are each rank's own. Buffers come in the order of their numbers.
    """
    said = {
        f"ranks of groups[{pattern!r}]": str(routes.whole.world_size)
        for pattern, routes in of_groups.items()
    }
    buffers = [buffer for unit in plans for buffer in unit.buffers]
    for number, buffer in enumerate(buffers if of_groups else ()):
        shapes = [tuple(param.shape) for param in buffer.params]
        kind = f"{buffer.dtype}, {'trainable' if buffer.trainable else 'frozen'}"
        said[f"flat buffer {number}"] = f"{kind}, of {buffer.ranks or 'all ranks'}: {shapes}"
    return said
