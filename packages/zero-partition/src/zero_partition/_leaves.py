"""Leaf modules: whole subtrees that are gathered and reduced as one, whatever runs inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from weakref import WeakSet

from torch import nn

from ._errors import PartitionError

_LEAVES: Final[WeakSet[nn.Module]] = WeakSet()  # no attribute: names belong to the model's author


def set_leaf_modules(
    model: nn.Module, which: type[nn.Module] | str | Sequence[type[nn.Module] | str]
) -> list[nn.Module]:
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


def unset_leaf_modules(
    model: nn.Module, which: type[nn.Module] | str | Sequence[type[nn.Module] | str]
) -> list[nn.Module]:
    """Undo `set_leaf_modules` for these modules, before the model is sharded. Local.

    Returns:
        The modules that were leaves and are no more.

    Raises:
        PartitionError: One of `which` fits no module.
    """
    found = [module for module in _find(model, which) if module in _LEAVES]
    for module in found:
        _LEAVES.discard(module)
    return found


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaf modules in `model`, in its order. Local."""
    return [module for module in model.modules() if module in _LEAVES]


def is_leaf(module: nn.Module) -> bool:
    """Whether this very module was set."""
    return module in _LEAVES


def outermost_leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the leaves inside `module` that lie in no other leaf."""
    for name, child in module.named_children():
        if child in _LEAVES:
            yield prefix + name, child
        else:
            yield from outermost_leaves(child, f"{prefix}{name}.")


def _find(
    model: nn.Module, which: type[nn.Module] | str | Sequence[type[nn.Module] | str]
) -> list[nn.Module]:
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
