"""Plans of units: the parameters of each, and how they lie in flat buffers. Planning only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Final, TypeAlias
from weakref import WeakSet

import torch
from torch import nn

from zero_partition.errors import PartitionError
from zero_partition.nested import is_wrapper
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import UnitPlan, plan_buffers, strides_of
from zero_partition.plan.precision import AS_IT_IS, Precision

from .early_shard import find_early

Which: TypeAlias = type[nn.Module] | str | Sequence[type[nn.Module] | str]
# No attribute of the modules: their names belong to the model's author.
_LEAVES: Final[WeakSet[nn.Module]] = WeakSet()


def set_leaf_modules(model: nn.Module, which: Which) -> list[nn.Module]:
    """Make modules into units as they are, for branches inside that depend on data. Local.

    A mixture of experts is whole before the router decides, so that ranks may choose different
    experts. Needed where ranks gather together (NCCL, or several hosts), before the model is
    sharded, on every rank alike; where ranks read each other's memory any branch is safe.
    A container without a forward (ModuleList, ModuleDict) is whole while the module that uses it
    runs: with the unit that encloses it.

    Args:
        model: Or any part of it.
        which: Classes, names of classes, names of modules as in `model.named_modules()`, or ends of
            such names (".moe"); one or several.

    Returns:
        The modules that became leaves by this call, in the model's order.

    Raises:
        PartitionError: One of `which` fits no module.
    """
    found = _find(model, which)
    _LEAVES.update(found)
    return found


def unset_leaf_modules(model: nn.Module, which: Which) -> list[nn.Module]:
    """Undo `set_leaf_modules` for these modules, before the model is sharded. Local.

    Returns:
        The modules that were leaves and are no more.

    Raises:
        PartitionError: One of `which` fits no module.
    """
    found = [module for module in _find(model, which) if module in _LEAVES]
    _LEAVES.difference_update(found)
    return found


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaf modules in `model`, in its order. Local."""
    return [module for module in model.modules() if module in _LEAVES]


def _find(model: nn.Module, which: Which) -> list[nn.Module]:
    wanted = [which] if isinstance(which, type | str) else list(which)
    modules = dict(model.named_modules())
    chosen: dict[nn.Module, None] = {}
    for one in wanted:
        fitting = [module for name, module in modules.items() if _fits(name, module, one)]
        if not fitting:
            classes = sorted({type(module).__name__ for module in modules.values()})
            raise PartitionError(
                f"leaf module {one!r}: no module of this {type(model).__name__} has this class, "
                f"name or end of a name; its classes are {', '.join(classes)}"
            )
        chosen |= dict.fromkeys(fitting)
    return [module for module in modules.values() if module in chosen]


def _fits(name: str, module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    is_end = name.endswith(wanted if wanted.startswith(".") else "." + wanted)
    return name == wanted or is_end or type(module).__name__ == wanted


_SMALL = "(small parameters)"


def choose_units(
    model: nn.Module, *, max_unit_bytes: int, min_unit_bytes: int = 0
) -> tuple[str, ...]:
    """Return the names of the modules that become units. Local.

    In a container (ModuleList, ModuleDict, Sequential), a block is a child whose class occurs more
    than once, such as the layers of a transformer. Of its other children, one becomes a unit if no
    unit is inside it, such as an embedding before the layers. A child of less than `min_unit_bytes`
    is not worth its hooks and messages: it stays with what encloses it, unless it is a block of a
    container that is larger than `max_unit_bytes`.

    What is in no container stays with the model itself. Modules that own more of it than the
    largest unit, or than `max_unit_bytes`, become units of their own: the model's own parameters
    are whole during all of a step. So do the blocks inside a block that is larger than that.
    Leaf modules (`set_leaf_modules`) become units as they are; one without a forward, such as a
    ModuleList, is no unit, and nothing inside it is.
    """
    chosen: list[str] = []
    large_bytes = max_unit_bytes
    # Of a module in several places, the first one counts.
    first = {module: name for name, module in model.named_modules()}

    def visit(module: nn.Module, name: str) -> None:
        classes = _classes_in(module)
        keeps_small = _bytes_of(module) <= max_unit_bytes
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if first[child] != path or not any(True for _ in child.parameters()):
                continue
            may_be_unit, is_small = _has_forward(child), _bytes_of(child) < min_unit_bytes
            if child in _LEAVES:
                # Otherwise it stays, whole, with what encloses it.
                if may_be_unit:
                    chosen.append(path)
            elif classes[type(child)] > 1 and may_be_unit:
                if keeps_small and is_small:
                    chosen.extend(_leaf_units_in(child, path))
                    continue
                chosen.append(path)
                if _bytes_of(child) > max_unit_bytes:
                    visit(child, path)
            else:
                num_chosen = len(chosen)
                if may_be_unit and _bytes_of(child, recurse=False) > large_bytes:
                    chosen.append(path)
                visit(child, path)
                is_single = classes.total() > 1 and len(chosen) == num_chosen
                if is_single and may_be_unit and not is_small:
                    chosen.append(path)

    if model in _LEAVES:
        return ()
    visit(model, "")
    if chosen:
        modules = dict(model.named_modules())
        large_bytes = min(max_unit_bytes, max(_bytes_of(modules[name]) for name in chosen))
        chosen.clear()
        visit(model, "")
    return tuple(chosen)


def _leaf_units_in(module: nn.Module, name: str) -> Iterator[str]:
    """Names of the leaves inside that lie in no other leaf, where they have a forward."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}"
        if child not in _LEAVES:
            yield from _leaf_units_in(child, path)
        elif _has_forward(child):
            yield path


def choose_small(
    model: nn.Module, *, small_param_numel: int, max_small_numel: int | None
) -> frozenset[int]:
    """Ids of the parameters that may be replicated: small ones, the first that fit together."""
    chosen, numel = set(), 0
    for param in model.parameters():
        is_small = 0 < param.numel() <= small_param_numel
        if is_small and (max_small_numel is None or numel + param.numel() <= max_small_numel):
            chosen.add(id(param))
            numel += param.numel()
    return frozenset(chosen)


def plan_units(
    model: nn.Module,
    unit_names: Sequence[str],
    *,
    world_size: int,
    cuts: Mapping[int, Cut] | None = None,
    group_of: Mapping[int, int] | None = None,
    small: Collection[int] = (),
    precision: Precision = AS_IT_IS,
    may_be_meta: bool = False,
    ranks_of: Mapping[int, str] | None = None,
    num_shards: Mapping[str, int] | None = None,
) -> tuple[UnitPlan, ...]:
    """Give every parameter of `model` to exactly one unit, and lay each unit out.

    A parameter belongs to the innermost chosen module that contains all modules that own it: tied
    parameters of different units end up with what encloses both. A unit in several places has what
    is in it.

    Args:
        model: Its parameters must be dense, of any strides.
        unit_names: Names of modules, "" excluded; what belongs to none of them is the model's own.
        world_size: Number of shards.
        cuts: Parameter id to where it may be cut; parameters without one may be cut anywhere.
        group_of: Parameter id to the optimizer's param group, so that a group's parameters lie
            side by side.
        small: Ids of parameters that are replicated, in a unit of their own.
        precision: Parameters lie in buffers of the dtype that it gives them.
        may_be_meta: Whether parameters on the meta device, which have no memory, are planned too.
        ranks_of: Parameter id to the pattern that has its ranks, of those with ranks of their own.
        num_shards: By pattern, in place of `world_size`.

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
    # Small parameters first, to be reduced last, unless the model's own order says otherwise.
    members: dict[str, list[nn.Parameter]] = {name: [] for name in (_SMALL, "", *unit_names)}
    names = _names_of(model)
    places = dict(model.named_modules(remove_duplicate=False))
    for param, param_names in names.items():
        if not (may_be_meta and param.is_meta):
            check_parameter(param, param_names[0])
        unit_name = _SMALL if id(param) in small else _unit_of(param_names, members, places)
        members[unit_name].append(param)
    _check_storages(names)
    used = [name for name, params in members.items() if params]
    outer = {around for name in used for around in enclosing(name)}
    # A module in several units stays whole from the first of them to the last.
    unit_of = {modules[name]: name for name in used if name in unit_names}
    for place, module in places.items():
        name = unit_of.get(module, place)
        if name != place and not set(unit_of.values()).isdisjoint(enclosing(place)):
            outer.add(name)
    buffers = plan_buffers(
        [members[name] for name in used],
        {id(param): param_names for param, param_names in names.items()},
        world_size,
        cuts or {},
        group_of or {},
        dtypes=precision.dtypes_of(model),
        travels=precision.travels_of(model),
        strides={id(param): found for param in names if (found := _strides_of(param)) is not None},
        ranks_of=ranks_of,
        num_shards=num_shards,
    )
    return tuple(
        UnitPlan(
            name=name,
            buffers=of_unit,
            is_outer=name in outer or name == _SMALL,
            is_replicated=name == _SMALL,
        )
        for name, of_unit in zip(used, buffers, strict=True)
    )


def check_parameter(param: nn.Parameter, name: str) -> None:
    """Raise PartitionError unless the parameter can become a view of a flat buffer."""
    if (early := find_early(param)) is not None:
        early.check_untouched(param, name)
        return
    if param.layout != torch.strided:
        raise PartitionError(
            f"parameter {name!r}: expected a dense tensor, got layout {param.layout}; "
            "convert it with param.to_dense() before sharding"
        )
    if param.is_meta:
        raise PartitionError(
            f"parameter {name!r} is on the meta device and has no values to shard; materialise "
            "the model with zero_engine.materialise(model, init=fn), or load weights with "
            "zero_engine.load_pretrained(model, folder), first"
        )
    if is_wrapper(param):
        raise PartitionError(
            f"parameter {name!r} is a {type(param).__name__}, a tensor made of others, and has no "
            "memory of its own to cut into shards; use a model without it, with weights in "
            "bfloat16, or in 4 bits by bitsandbytes, which are plain tensors"
        )
    if any(
        stride == 0 for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1
    ):
        raise PartitionError(
            f"parameter {name!r}: expected memory for each element, got shape {tuple(param.shape)} "
            f"with strides {param.stride()}, as expand() makes it; assign param.data = "
            "param.data.contiguous() first"
        )


def _strides_of(param: nn.Parameter) -> tuple[int, ...] | None:
    early = find_early(param)
    return strides_of(param) if early is None else early.strides


def _names_of(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param] = (*names.get(param, ()), name)
    return names


def _check_storages(names: Mapping[nn.Parameter, tuple[str, ...]]) -> None:
    seen: dict[int, str] = {}
    for param, (name, *_) in names.items():
        if not param.numel() or param.is_meta:
            continue
        other = seen.setdefault(param.untyped_storage().data_ptr(), name)
        if other is not name:
            raise PartitionError(
                f"parameters {other!r} and {name!r} are different Parameter objects over one "
                "storage; tie them by assigning the same Parameter to both modules, or give each "
                "its own memory with param.data = param.data.clone()"
            )


def _unit_of(names: Sequence[str], units: Container[str], places: Mapping[str, nn.Module]) -> str:
    unit_name = _innermost(names[:1], units)
    if len(names) == 1:
        return unit_name
    inside = names[0].removeprefix(unit_name)
    names_of_unit = {name for name, module in places.items() if module is places[unit_name]}
    is_always_there = all(name.removesuffix(inside) in names_of_unit for name in names)
    return unit_name if is_always_there else _innermost(names, units)


def _innermost(param_names: Sequence[str], units: Container[str]) -> str:
    first, *others = ({*enclosing(name)} for name in param_names)
    common = first.intersection(*others)
    return max((name for name in common if name in units), key=len)


def enclosing(name: str) -> Iterator[str]:
    """Names of all modules that contain what has this name, the model's own included."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _classes_in(module: nn.Module) -> Counter[type[nn.Module]]:
    """Return how often each class occurs among the children of a container; none of another."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return Counter()
    return Counter(type(c) for c in module.children() if any(True for _ in c.parameters()))


def _has_forward(module: nn.Module) -> bool:
    # Asked of the object: a module that torch.compile has wrapped has its forward there.
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _bytes_of(module: nn.Module, *, recurse: bool = True) -> int:
    params = module.parameters(recurse=recurse)
    return sum(param.numel() * param.element_size() for param in params)
