"""Reductions in two hops: inside each node, and what that leaves across nodes.

Rank r of N nodes with L ranks is the r % L-th of node r // L. In the first hop the ranks of a node
add up, each for its counterparts on all nodes, the chunks of these: rank l has then the node's sums
of chunks l, L + l, 2L + l, ... In the second hop the counterparts exchange and add those. So across
nodes go (N-1) chunks from each rank, not (N-1) L; and rank r has its own chunk, as without levels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain, islice
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from zero_comm.codecs.blockwise import Blockwise
from zero_comm.codecs.cast import Cast
from zero_comm.codecs.codec import AbstractCodec, check_encodable

from .agreement import all_gather_json, check_agreement
from .coalesced import check_list
from .errors import GroupMismatchError
from .flat import add_up, wire_for
from .group import Group
from .handle import Handle
from .loco import Level, LocoErrors
from .planning import sent_in_hops
from .reduction import Reduction, finish_mean
from .torch_private import timeout_of
from .transport import (
    check_mean,
    check_tensor,
    chunks_of,
    launch_exchange,
    own_chunk,
)

_MADE: Final[WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[Group, Group]]]] = (
    WeakKeyDictionary()
)
_SEVERAL_NODES: Final = "its ranks are of several nodes"


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
    def from_mesh(cls, mesh: dist.DeviceMesh, *, whole: Group | None = None) -> Levels:
        """Levels of a 2-D DeviceMesh: the first axis goes across nodes, the second inside one.

        Collective over the ranks of the mesh the first time, as process groups are made.

        Args:
            mesh: In the order of the ranks, as `init_device_mesh` makes it.
            whole: The group of all its ranks, where there is one already.

        Raises:
            GroupMismatchError: The mesh has other than two axes, or does not fit `whole`.
            CommError: This rank is not in the mesh.
        """
        if mesh.ndim != 2:
            raise GroupMismatchError(
                f"expected a mesh of two axes, (nodes, ranks of a node), got shape "
                f"{tuple(mesh.shape)}; choose two of them by mesh['name', 'name']"
            )
        across, inside = (Group.from_mesh(mesh, axis) for axis in (0, 1))
        if whole is None:
            whole = inside.spanning(mesh.mesh.flatten().tolist())
        across, inside = (
            _alone(each) if each.world_size == 1 else each for each in (across, inside)
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
            found = group.positions_in(whole)
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
            whole = whole.by_messages(_SEVERAL_NODES)
        return cls(
            evolve(whole, nodes=nodes),
            evolve(inside, nodes=(node,) * size, recorders=recorders),
            evolve(
                across.by_messages(_SEVERAL_NODES),
                nodes=tuple(range(len(nodes) // size)),
                recorders=recorders,
            ),
        )

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return self.across.world_size


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
        timeout=timeout_of(whole, group.device),
        backend=group.backend.name,
        # Other ranks of the job do not take part.
        use_local_synchronization=True,
    )
    patience_s = None if group.watch is None else group.watch.patience_s
    return Group.from_process_group(made, device=group.device, patience_s=patience_s)


def _alone(group: Group) -> Group:
    """A level with no other rank in it."""
    return Group.solo(group.device)


_NAME: Final = "reduce_scatter"


def reduce_scatter_by_levels(
    buffer: Tensor,
    *,
    splits: Sequence[int],
    levels: Levels,
    codec: AbstractCodec | None = None,
    errors: LocoErrors | None = None,
    op: Reduction = Reduction.MEAN,
    out: Tensor | None = None,
    tag: int = 0,
    payload: Sequence[int] | None = None,
) -> Handle[Tensor]:
    """Combine all ranks' `buffer` in two hops and keep this rank's chunk. Collective.

    Values are encoded once for each hop, chunk by chunk, decoded, and added in float32: over the
    ranks of a node in their order, then over the nodes in theirs. A hop between one rank moves
    nothing and encodes nothing. The second hop is launched by `advance` or `wait`, and `buffer` is
    this rank's own again from then on: reductions over the same levels must be advanced and waited
    on in the same order everywhere.

    Args:
        buffer: 1-D, contiguous, `sum(splits)` elements; float32, bfloat16 or float16, on the
            group's device. Borrowed until the handle was waited on; written only where `out` is a
            part of it.
        splits: Elements per rank of `levels.whole`, in rank order; the same on every rank.
        levels: The ranks that take part.
        codec: How values are written while they travel; in the buffer's dtype when None.
        errors: Where the errors of encoding are kept and fed back; they are not when None.
        op: MEAN or SUM.
        out: Receives the result, `splits[rank]` elements of the buffer's dtype; may be this rank's
            chunk of `buffer`. Allocated when None.
        tag: As for `all_gather_flat`.
        payload: As for `all_gather_flat`.

    Returns:
        Handle of `out`.

    Raises:
        GroupMismatchError: `buffer` or `out` does not fit `splits` or the group's device.
        CodecError: The buffer's dtype is none of these, or `errors` are of another buffer.
    """
    whole = levels.whole
    own = own_chunk(buffer, splits, whole)
    check_mean(buffer, op, whole)
    codec = Cast(buffer.dtype) if codec is None else codec
    check_encodable((buffer,), codec)
    if out is None:
        out = torch.empty_like(own)
    else:
        check_tensor(out, own.numel(), whole, "out", dtype=buffer.dtype)
    payload = splits if payload is None else payload
    parts = [[chunk] for chunk in chunks_of(buffer, splits)]
    count_hops(parts, [[numel] for numel in payload], levels=levels, codec=codec, tag=tag)
    reduction = add_by_levels(parts, levels=levels, codec=codec, errors=errors, tag=tag)

    def finish(totals: list[Tensor]) -> Tensor:
        (total,) = totals
        finish_mean(total, op=op, world_size=whole.world_size)
        return out.copy_(total)

    return reduction.map(finish)


def add_by_levels(
    parts: Sequence[Sequence[Tensor]],
    *,
    levels: Levels,
    codec: AbstractCodec,
    errors: LocoErrors | None,
    tag: int,
) -> Handle[list[Tensor]]:
    """Send each rank its parts in two hops; return a handle of this rank's sums, in float32."""
    if errors is not None:
        errors.begin()
    num_local, num_parts = levels.inside.world_size, len(parts[0])
    inside = _Hop(levels.inside, Level.INSIDE, codec, errors)
    across = _Hop(levels.across, Level.ACROSS, codec, errors)
    # For each rank of this node, the parts for the ranks at its place in all nodes.
    by_local = [list(chain(*parts[local::num_local])) for local in range(num_local)]
    first = inside.launch(by_local, tag=tag)

    def launch_second(sums: list[Tensor]) -> Handle[list[Tensor]]:
        left = iter(sums)
        by_node = [list(islice(left, num_parts)) for _ in range(levels.num_nodes)]
        return across.launch(by_node, tag=tag, is_late=True)

    if num_local == 1:
        # A first hop of one rank sends nothing.
        return launch_second(first.wait())
    return first if levels.num_nodes == 1 else first.then(launch_second)


def count_hops(
    parts: Sequence[Sequence[Tensor]],
    payload: Sequence[Sequence[int]],
    *,
    levels: Levels,
    codec: AbstractCodec,
    tag: int,
) -> None:
    """Count one call, whose two hops send different parts."""
    whole, num_local = levels.whole, levels.inside.world_size
    numels = tuple(tuple(part.numel() for part in row) for row in parts)
    carried = tuple(tuple(row) for row in payload)
    whole.count(_NAME, sent_in_hops, numels, carried, whole.rank, num_local, codec, tag=tag)


@frozen(eq=False)
class _Hop:
    """An exchange in which each rank adds up what all have for it."""

    group: Group
    level: Level
    codec: AbstractCodec
    errors: LocoErrors | None

    def launch(
        self, parts: Sequence[Sequence[Tensor]], *, tag: int, is_late: bool = False
    ) -> Handle[list[Tensor]]:
        """Send each rank its parts; return a handle of this rank's sums, in float32."""
        codec, own = self.codec, parts[self.group.rank]
        if self.group.world_size == 1:
            return Handle(lambda _: [part.float() for part in own], (), own)
        sent = [part for each in parts for part in each]
        wire, rows = wire_for(sent, codec)
        if self.errors is None:
            for part, row in zip(sent, rows, strict=True):
                codec.encode(part, row)
        else:
            self.errors.encode(self.level, sent, rows, codec)
        wire_splits = [sum(codec.wire_bytes(part.numel()) for part in each) for each in parts]
        exchange = launch_exchange(
            wire, wire_splits, group=self.group, name=_NAME, tag=tag, is_late=is_late
        )

        def finish(timeout_s: float | None) -> list[Tensor]:
            numels = [codec.wire_bytes(part.numel()) for part in own]
            received = [chunks_of(row, numels) for row in exchange.wait(timeout_s=timeout_s)]
            return [
                add_up(rows, torch.empty_like(part, dtype=torch.float32), codec)
                for part, *rows in zip(own, *received, strict=True)
            ]

        return Handle(finish, inside=(exchange,))


_INT4: Final = Blockwise(bits=4)


def all_to_all_quant_reduce(
    tensors: Sequence[Tensor], levels: Levels, *, codec: AbstractCodec = _INT4
) -> Handle[list[Tensor]]:
    """Average each tensor over the ranks and keep this rank's part of it. Collective.

    Works as `reduce_scatter_by_levels`: one encoding for each of two hops, inside the node and
    across nodes. A rank's part has `ceil(numel / world size)` elements, in rank order; where that
    does not divide, the last parts are shorter, or empty. Every part is encoded apart.

    Args:
        tensors: Contiguous, on the group's device, of any shape; float32, bfloat16 or float16. The
            same shapes and dtypes on every rank. Borrowed until the handle was waited on; never
            written.
        levels: The ranks that take part.
        codec: How values are written while they travel.

    Returns:
        Handle of one 1-D tensor for each, in its dtype.

    Raises:
        GroupMismatchError: A tensor is on another device or not contiguous.
        CodecError: The dtype of one is none of these.
    """
    return _reduce(tensors, levels, codec, errors=None)


def all_to_all_loco_quant_reduce(
    tensors: Sequence[Tensor],
    levels: Levels,
    errors: LocoErrors,
    *,
    codec: AbstractCodec = _INT4,
) -> Handle[list[Tensor]]:
    """Reduce as `all_to_all_quant_reduce`, with error feedback. Collective.

    Errors of encoding are added to the values of the next reduction.

    Args:
        tensors: As for `all_to_all_quant_reduce`.
        levels: The ranks that take part.
        errors: Errors of these tensors; the same object each time they are reduced.
        codec: How values are written while they travel.

    Returns:
        Handle of one 1-D tensor for each, in its dtype.

    Raises:
        GroupMismatchError: A tensor is on another device or not contiguous.
        CodecError: The dtype of one is none of these, or `errors` are of other tensors.
    """
    return _reduce(tensors, levels, codec, errors=errors)


def _reduce(
    tensors: Sequence[Tensor], levels: Levels, codec: AbstractCodec, *, errors: LocoErrors | None
) -> Handle[list[Tensor]]:
    whole = levels.whole
    check_list(tensors, whole)
    check_encodable(tensors, codec)
    cut = [_parts(tensor, whole.world_size) for tensor in tensors]
    parts = [[each[rank] for each in cut] for rank in range(whole.world_size)]
    payload = [[part.numel() for part in row] for row in parts]
    count_hops(parts, payload, levels=levels, codec=codec, tag=0)
    reduction = add_by_levels(parts, levels=levels, codec=codec, errors=errors, tag=0)

    def finish(totals: list[Tensor]) -> list[Tensor]:
        for total in totals:
            finish_mean(total, op=Reduction.MEAN, world_size=whole.world_size)
        return [total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]

    return reduction.map(finish)


def _parts(tensor: Tensor, world_size: int) -> list[Tensor]:
    flat = tensor.detach().view(-1)
    numel = -(-flat.numel() // world_size)
    return [flat[rank * numel : (rank + 1) * numel] for rank in range(world_size)]
