"""How the parameters of units lie in flat buffers: planning only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from attrs import frozen
from torch import nn

from ._balance import Balance
from ._cut import Cut
from ._gather_plan import Extent
from ._layout import FlatLayout, byte_offsets

ALIGN_BYTES = (
    64  # vector units and compiled kernels assume it; else compiled code copies its inputs
)

# NOTE(whole): shards are in rank order, so where tensors are never cut, a flat buffer holds them in
# the order of the ranks that keep them. Which rank that is, is decided for all units together, the
# largest first: a unit with one large matrix gives it to one rank, and the next unit's goes to
# another. A buffer of parameters that may be cut anywhere is cut evenly, whatever else there is,
# since backends move equal shards fastest.

_JOINS_WHOLE = 4  # what may be cut stays with what may not if it has at most 1/4 of the elements


@frozen
class ParameterPlan:
    """One parameter: every name it goes by, and the tensor it is."""

    names: tuple[str, ...]  # tied parameters have several; the first is the one in messages
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    cut: Cut = Cut.FLAT

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@frozen
class BufferPlan:
    """One flat buffer: parameters of a unit that share a dtype, and are trainable or not.

    Those that no rank may cut lie apart from large ones that it may; see NOTE(whole).
    """

    params: tuple[ParameterPlan, ...]
    layout: FlatLayout
    dtype: torch.dtype
    trainable: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer, padding included."""
        return self.layout.numel * self.dtype.itemsize


def plan_buffers(
    units: Sequence[Sequence[nn.Parameter]],
    names: Mapping[int, tuple[str, ...]],
    world_size: int,
    cuts: Mapping[int, Cut],
    group_of: Mapping[int, int],
    *,
    dtypes: Mapping[int, torch.dtype],
) -> list[tuple[BufferPlan, ...]]:
    """The buffers of every unit, planned together; see NOTE(whole)."""
    kinds = [_kinds_of(params, cuts, group_of, dtypes) for params in units]
    owners: dict[int, int] = {}
    balances = {trainable: Balance.of(world_size) for trainable in (True, False)}
    for trainable, balance in balances.items():
        whole = [
            param
            for kind in kinds
            for (_, of_trainable, is_whole), params in kind.items()
            if is_whole and of_trainable is trainable
            for param in params
        ]
        ranks = balance.give_whole([param.numel() * param.element_size() for param in whole])
        owners.update(zip(map(id, whole), ranks, strict=True))

    def plan(kind: tuple[torch.dtype, bool, bool], params: list[nn.Parameter]) -> BufferPlan:
        dtype, trainable, is_whole = kind
        if is_whole:
            params = sorted(params, key=lambda param: owners[id(param)])  # stable
        plans = tuple(
            ParameterPlan(names[id(p)], p.shape, dtype, trainable, cuts.get(id(p), Cut.FLAT))
            for p in params
        )
        ranks = [owners[id(param)] for param in params] if is_whole else None
        layout = _lay_out(plans, dtype, world_size, ranks, balances[trainable])
        return BufferPlan(plans, layout, dtype, trainable)

    return [tuple(plan(kind, params) for kind, params in unit.items()) for unit in kinds]


def _kinds_of(
    params: Sequence[nn.Parameter],
    cuts: Mapping[int, Cut],
    group_of: Mapping[int, int],
    dtypes: Mapping[int, torch.dtype],
) -> dict[tuple[torch.dtype, bool, bool], list[nn.Parameter]]:
    """By dtype, whether they train, and whether they stay whole: one buffer each."""
    kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((dtypes[id(param)], param.requires_grad), []).append(param)
    split: dict[tuple[torch.dtype, bool, bool], list[nn.Parameter]] = {}
    for (dtype, trainable), chosen in kinds.items():
        chosen.sort(key=lambda param: group_of.get(id(param), -1))  # stable: model order within
        whole = [param for param in chosen if cuts.get(id(param)) == Cut.TENSOR]
        rest = [param for param in chosen if cuts.get(id(param)) != Cut.TENSOR]
        if whole and _numel(rest) * _JOINS_WHOLE <= _numel(whole):
            whole, rest = chosen, []  # one collective fewer, and hardly worse balanced
        for is_whole, members in ((True, whole), (False, rest)):
            if members:
                split[dtype, trainable, is_whole] = members
    return split


def _lay_out(
    plans: Sequence[ParameterPlan],
    dtype: torch.dtype,
    world_size: int,
    owners: Sequence[int] | None,
    balance: Balance,
) -> FlatLayout:
    numels = [plan.shape.numel() for plan in plans]
    align = max(1, ALIGN_BYTES // dtype.itemsize)
    if owners is not None:
        return FlatLayout.plan_whole(numels, owners, world_size=world_size, align=align)
    if all(plan.cut == Cut.FLAT for plan in plans):
        return FlatLayout.plan(numels, world_size=world_size, align=align)
    layout = FlatLayout.plan_cut(
        numels,
        [_grain_of(plan, align, world_size) for plan in plans],
        world_size=world_size,
        align=align,
        loads=[num_bytes / dtype.itemsize for num_bytes in balance.bytes_per_rank],
    )
    balance.give_parts([numel * dtype.itemsize for numel in layout.splits])
    return layout


def _grain_of(plan: ParameterPlan, align: int, world_size: int) -> int:
    """As the cut says, and on the alignment too where shards stay about even."""
    grain = plan.cut.grain(plan.shape)
    aligned = math.lcm(grain, align)
    is_fine = plan.cut == Cut.FLAT or 4 * world_size * aligned <= plan.shape.numel()
    return aligned if is_fine else grain


def _numel(params: Sequence[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


@frozen
class UnitPlan:
    """Parameters that are unsharded, resharded and reduced together."""

    name: str  # of the module whose forward uses them; "" is the model itself
    buffers: tuple[BufferPlan, ...]
    is_outer: bool  # other units run inside this one's forward
    rests_whole: bool = False  # on every rank, at every stage; used by any module

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each buffer starts when they lie in one slot, in bytes, and where the last ends."""
        return byte_offsets(buffer.num_bytes for buffer in self.buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes that its slot must have."""
        return self.offsets[-1]

    @cached_property
    def extent(self) -> Extent:
        """What it takes while it is whole."""
        numel = sum(buffer.layout.payload_numel for buffer in self.buffers)
        return Extent(numel, self.num_bytes, self.is_outer)
