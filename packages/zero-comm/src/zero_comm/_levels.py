"""Two levels of a group: ranks of one node, and the ranks of all nodes at one place in theirs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from attrs import evolve, frozen

from ._agreement import all_gather_json, check_agreement
from ._errors import GroupMismatchError
from ._group import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MADE: Final[WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[Group, Group]]]] = (
    WeakKeyDictionary()
)


@frozen(eq=False)
class Levels:
    """A group, and in it this rank's node and its counterparts on the other nodes.

    Rank r of `whole` is rank r % L of `inside` and rank r // L of `across`, where nodes have L
    ranks. Levels are believed: ranks of different nodes never read each other's memory, even where
    they run on one host. A level of one rank moves nothing.

    Made by `of_nodes()`, `from_mesh()` and `of()`.
    """

    whole: Group
    inside: Group  # the ranks of this rank's node
    across: Group  # the ranks at this rank's place in every node

    @classmethod
    def of_nodes(
        cls, group: Group, ranks_per_node: int | None = None, *, timeout_s: float = 60.0
    ) -> Levels:
        """Levels of a group whose nodes have equally many ranks, one after the other. Collective.

        Makes process groups the first time, and finds them again after that.

        Args:
            group: The whole.
            ranks_per_node: Of a node, or of what is to count as one. None: what torchrun says, in
                RANK and LOCAL_WORLD_SIZE.
            timeout_s: Longest wait for the other ranks the first time.

        Raises:
            GroupMismatchError: The group is no whole number of such nodes, or the ranks of a node
                do not follow each other, or torchrun's variables are missing.
            AgreementError: Ranks ask for different numbers.
            CommError: A rank did not take part in time.
        """
        if group.world_size == 1:
            return cls.of(group, _alone(group), _alone(group))
        if ranks_per_node is None:
            ranks_per_node = _found_per_node(group, timeout_s=timeout_s)
        else:
            facts = {"ranks of a node": str(ranks_per_node)}
            check_agreement(facts, group=group, timeout_s=timeout_s)
        if ranks_per_node < 1 or group.world_size % ranks_per_node:
            raise GroupMismatchError(
                f"expected ranks_per_node to divide the {group.world_size} ranks of the group, got "
                f"{ranks_per_node} (rank {group.rank}); every node must have as many ranks"
            )
        made = _MADE.setdefault(group.process_group, {})
        if ranks_per_node not in made:
            node, local = divmod(group.rank, ranks_per_node)
            every = range(group.world_size)
            made[ranks_per_node] = (
                _part_of(group, every[node * ranks_per_node : (node + 1) * ranks_per_node]),
                _part_of(group, every[local::ranks_per_node]),
            )
        return cls.of(group, *made[ranks_per_node])

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, *, whole: Group | None = None) -> Levels:
        """Levels of a 2-D DeviceMesh: the first axis goes across nodes, the second inside one.

        Collective as `Group.from_process_group` is.

        Args:
            mesh: In the order of the ranks, as `init_device_mesh` makes it.
            whole: The group of all its ranks; that of the whole job when None.

        Raises:
            GroupMismatchError: The mesh has other than two axes, or does not fit `whole`.
        """
        if mesh.ndim != 2:
            raise GroupMismatchError(
                f"expected a mesh of two axes, (nodes, ranks of a node), got shape "
                f"{tuple(mesh.shape)}; choose two of them by mesh['name', 'name']"
            )
        if whole is None:
            whole = Group.from_process_group()
        across, inside = (
            Group.from_mesh(mesh, axis) if mesh.size(axis) > 1 else _alone(whole) for axis in (0, 1)
        )
        return cls.of(whole, inside, across)

    @classmethod
    def of(cls, whole: Group, inside: Group, across: Group) -> Levels:
        """Levels of groups that exist. Local.

        Args:
            whole: All ranks.
            inside: Those of this rank's node: consecutive in `whole`.
            across: Those at this rank's place in every node.

        Raises:
            GroupMismatchError: The three do not fit; which ranks each has, and should have.
        """
        size = inside.world_size
        node, local = divmod(whole.rank, size)
        expected = {
            "inside": [node * size + rank for rank in range(size)],
            "across": list(range(local, whole.world_size, size)),
        }
        for name, group in {"inside": inside, "across": across}.items():
            found = _positions(group, whole)
            if found != expected[name]:
                raise GroupMismatchError(
                    f"levels of {whole.world_size} ranks with {size} to a node: expected {name!r} "
                    f"to be the ranks {expected[name]} of the whole, in this order, got {found} "
                    f"(rank {whole.rank}); number the ranks node by node, as torchrun does, with "
                    "as many on each"
                )
            if group.watch is not None and whole.watch is not None:
                group.watch.join(whole.watch, found)
        nodes = tuple(rank // size for rank in range(whole.world_size))
        recorders = whole.recorders
        if inside.world_size < whole.world_size:
            whole = _by_messages(whole)
        return cls(
            evolve(whole, nodes=nodes),
            evolve(inside, nodes=(node,) * size, recorders=recorders),
            evolve(
                _by_messages(across), nodes=tuple(range(len(nodes) // size)), recorders=recorders
            ),
        )

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return self.across.world_size


def _by_messages(group: Group) -> Group:
    """The same, whose ranks are taken for ranks of other hosts."""
    if group.peers is None:
        return group
    return evolve(group, peers=None, transport="messages, because its ranks are of several nodes")


def _found_per_node(group: Group, *, timeout_s: float) -> int:
    """Ranks of a node, as torchrun has told the ranks. Collective."""
    names = ("RANK", "LOCAL_WORLD_SIZE")
    mine = [int(os.environ[name]) for name in names if name in os.environ]
    node = mine[0] // mine[1] if len(mine) == len(names) else None
    nodes = all_gather_json(node, group=group, timeout_s=timeout_s)
    if None in nodes:
        raise GroupMismatchError(
            f"rank {nodes.index(None)} does not know its node, because {' or '.join(names)} is not "
            f"set (seen on rank {group.rank}); start with torchrun, or pass ranks_per_node"
        )
    size = nodes.count(nodes[0])
    if nodes != [node for node in dict.fromkeys(nodes) for _ in range(size)]:
        raise GroupMismatchError(
            f"expected nodes with equally many ranks of the group, one after the other, got ranks "
            f"on nodes {nodes} (rank {group.rank}); start as many on each node, and number the "
            "ranks of a group node by node"
        )
    return size


def _part_of(group: Group, ranks: Sequence[int]) -> Group:
    """A new group of some of its ranks, this one among them. Collective among these."""
    if len(ranks) == 1:
        return _alone(group)
    whole = group.process_group
    made = dist.new_group(
        [group.global_rank(rank) for rank in ranks],
        timeout=whole._get_backend(group.device).options._timeout,
        backend=group.backend.name,
        use_local_synchronization=True,  # the other ranks of the job need not know
    )
    patience_s = None if group.watch is None else group.watch.patience_s
    return Group.from_process_group(made, device=group.device, patience_s=patience_s)


def _alone(group: Group) -> Group:
    """A level with no other rank in it."""
    return Group.solo(group.device)


def _positions(group: Group, whole: Group) -> list[int]:
    """Where the ranks of a group are in the whole; -1 for those that are not."""
    if group.process_group is None:
        return [whole.rank]
    if whole.process_group is None:
        return [-1] * group.world_size
    position = {whole.global_rank(rank): rank for rank in range(whole.world_size)}
    return [position.get(group.global_rank(rank), -1) for rank in range(group.world_size)]
