"""Which parameters form a unit, and how a unit lies in flat buffers: planning only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from attrs import frozen
from torch import nn

from ._balance import Balance
from ._cut import Cut
from ._errors import PartitionError
from ._layout import FlatLayout, byte_offsets
from ._leaves import is_leaf, outermost_leaves

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


@frozen
class UnitPlan:
    """Parameters that are unsharded, resharded and reduced together."""

    name: str  # of the module whose forward uses them; "" is the model itself
    buffers: tuple[BufferPlan, ...]
    is_outer: bool  # other units run inside this one's forward

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each buffer starts when they lie in one slot, in bytes, and where the last ends."""
        return byte_offsets(buffer.num_bytes for buffer in self.buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes that its slot must have."""
        return self.offsets[-1]


def choose_units(
    model: nn.Module, *, max_unit_bytes: int, min_unit_bytes: int = 0
) -> tuple[str, ...]:
    """Names of the modules that become units: repeated blocks, and what is too large to stay whole.

    A block is a child of a container whose children are all of one class (the layers of a
    transformer, say). What belongs to no block stays with the model itself; modules that own more
    than `max_unit_bytes` of it become units of their own, and so do the blocks inside a block that
    is larger than that. A block of less than `min_unit_bytes` is not worth its hooks and messages:
    it stays with what encloses it, unless the container as a whole is larger than `max_unit_bytes`.
    Leaf modules (`set_leaf_modules`) become units as they are.
    """
    chosen: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if not any(True for _ in child.parameters()):
                continue
            if is_leaf(child):
                chosen.append(path)
            elif _is_repeated(module) and _has_forward(child):
                if _bytes_of(child) < min_unit_bytes and _bytes_of(module) <= max_unit_bytes:
                    chosen.extend(f"{path}.{inner}" for inner, _ in outermost_leaves(child))
                    continue
                chosen.append(path)
                if _bytes_of(child) > max_unit_bytes:
                    visit(child, path)
            else:
                if _has_forward(child) and _own_bytes_of(child) > max_unit_bytes:
                    chosen.append(path)
                visit(child, path)

    visit(model, "")
    return tuple(chosen)


def plan_units(
    model: nn.Module,
    unit_names: Sequence[str],
    *,
    world_size: int,
    cuts: Mapping[int, Cut] | None = None,
    group_of: Mapping[int, int] | None = None,
) -> tuple[UnitPlan, ...]:
    """Give every parameter of `model` to exactly one unit, and lay each unit out.

    A parameter belongs to the innermost chosen module that contains all modules that own it: tied
    parameters of different units end up with what encloses both.

    Args:
        model: Its parameters must be dense and contiguous.
        unit_names: Names of modules, "" excluded; what belongs to none of them is the model's own.
        world_size: Number of shards.
        cuts: Parameter id to where it may be cut; anywhere for those it does not hold.
        group_of: Parameter id to the optimizer's param group, so that a group's parameters lie
            side by side.

    Raises:
        PartitionError: A name is no module, or has no forward to hook, or a parameter cannot be
            flattened.
    """
    modules = dict(model.named_modules())
    for name in unit_names:
        if name not in modules:
            raise PartitionError(
                f"unit {name!r}: the model has no module of this name; see model.named_modules()"
            )
        if not _has_forward(modules[name]):
            raise PartitionError(
                f"unit {name!r}: a {type(modules[name]).__name__} has no forward of its own, so "
                "nothing says when it is used; name the modules inside it"
            )
    members: dict[str, list[nn.Parameter]] = {name: [] for name in ("", *unit_names)}
    names = _names_of(model)
    by_id = {id(param): param for param in model.parameters()}
    for key, param_names in names.items():
        check_parameter(by_id[key], param_names[0])
        members[_innermost(param_names, members)].append(by_id[key])
    _check_storages(by_id, names)
    used = [name for name, params in members.items() if params]
    buffers = _plan_buffers(
        [members[name] for name in used], names, world_size, cuts or {}, group_of or {}
    )
    return tuple(
        UnitPlan(
            name=name,
            buffers=of_unit,
            is_outer=any(_contains(name, other) for other in used if other != name),
        )
        for name, of_unit in zip(used, buffers, strict=True)
    )


def check_parameter(param: nn.Parameter, name: str) -> None:
    """Raise PartitionError unless the parameter can become a view of a flat buffer."""
    if param.layout != torch.strided:
        raise PartitionError(
            f"parameter {name!r}: expected a dense tensor, got layout {param.layout}; "
            "convert it with param.to_dense() before sharding"
        )
    if param.is_meta:
        raise PartitionError(
            f"parameter {name!r} is on the meta device and has no values to shard; materialise "
            "the model with model.to_empty(device=...) and initialise it first"
        )
    if not param.is_contiguous():
        raise PartitionError(
            f"parameter {name!r}: expected contiguous memory, got shape {tuple(param.shape)} with "
            f"strides {param.stride()}; assign param.data = param.data.contiguous() first"
        )


def _plan_buffers(
    units: Sequence[Sequence[nn.Parameter]],
    names: Mapping[int, tuple[str, ...]],
    world_size: int,
    cuts: Mapping[int, Cut],
    group_of: Mapping[int, int],
) -> list[tuple[BufferPlan, ...]]:
    """The buffers of every unit, planned together; see NOTE(whole)."""
    kinds = [_kinds_of(params, cuts, group_of) for params in units]
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
    params: Sequence[nn.Parameter], cuts: Mapping[int, Cut], group_of: Mapping[int, int]
) -> dict[tuple[torch.dtype, bool, bool], list[nn.Parameter]]:
    """By dtype, whether they train, and whether they stay whole: one buffer each."""
    kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.requires_grad), []).append(param)
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


def _names_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)] = (*names.get(id(param), ()), name)
    return names


def _check_storages(by_id: dict[int, nn.Parameter], names: dict[int, tuple[str, ...]]) -> None:
    seen: dict[int, str] = {}
    for key, param in by_id.items():
        if not param.numel():
            continue
        address = param.untyped_storage().data_ptr()
        if address in seen:
            raise PartitionError(
                f"parameters {seen[address]!r} and {names[key][0]!r} are different Parameter "
                "objects over one storage; tie them by assigning the same Parameter to both "
                "modules, or give each its own memory with param.data = param.data.clone()"
            )
        seen[address] = names[key][0]


def _innermost(param_names: Sequence[str], units: dict[str, list]) -> str:
    enclosing = [unit for unit in units if all(_contains(unit, name) for name in param_names)]
    return max(enclosing, key=len)


def _contains(unit: str, name: str) -> bool:
    return not unit or name.startswith(unit + ".")


def _is_repeated(container: nn.Module) -> bool:
    children = [c for c in container.children() if any(True for _ in c.parameters())]
    is_list = isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    return is_list and len(children) > 1 and len({type(child) for child in children}) == 1


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _bytes_of(module: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in module.parameters())


def _own_bytes_of(module: nn.Module) -> int:
    own = module.parameters(recurse=False)
    return sum(param.numel() * param.element_size() for param in own)
