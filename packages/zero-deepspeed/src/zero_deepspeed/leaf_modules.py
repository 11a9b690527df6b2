"""Leaf modules in the three ways in which DeepSpeed's files and functions name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, final
from weakref import WeakSet

import torch.distributed as dist
from attrs import field, frozen
from torch import nn
from zero_comm.logs import warn_user
from zero_partition import get_leaf_modules, set_leaf_modules, unset_leaf_modules

# Leaves by default, as in DeepSpeed: classes of transformers.
LEAF_CLASSES: Final = tuple(
    f"transformers.models.{model}.modeling_{model}.{name}SparseMoeBlock"
    for model, name in (
        ("mixtral", "Mixtral"),
        ("qwen2_moe", "Qwen2Moe"),
        ("qwen3_moe", "Qwen3Moe"),
    )
)

# Modules that `set_leaf` made leaves; to find a parameter's without its model.
_SET: Final[WeakSet[nn.Module]] = WeakSet()


def find_modules(model: nn.Module, wanted: Iterable[Any], how: str) -> dict[Any, list[nn.Module]]:
    """Return, for each of `wanted`, the modules that fit, in the order of `named_modules()`.

    `how` is the key of the file's section that says how they are named. A class may be given by its
    name, with or without its module's before it; its subclasses do not fit then.
    """
    fits, modules = _FITS[how], list(model.named_modules())
    return {one: [module for name, module in modules if fits(name, module, one)] for one in wanted}


def set_leaf(module: nn.Module, is_leaf: bool) -> None:
    """Make this very module a leaf, or no leaf."""
    # "" is the name of a module in its own `named_modules`.
    (set_leaf_modules if is_leaf else unset_leaf_modules)(module, "")
    (_SET.add if is_leaf else _SET.discard)(module)


def is_in_leaf(param: nn.Parameter) -> bool:
    """Return whether a parameter is in a module that `set_leaf` made a leaf, and still is one."""
    leaves = [module for module in _SET if module in get_leaf_modules(module)]
    return any(one is param for leaf in leaves for one in leaf.parameters())


@final
@frozen
class LeafModules:
    """Callable that makes leaves of the modules that `zero_optimization.leaf_module` names.

    Args:
        section: "classes", "names" and "name_suffixes", as in the file.
    """

    section: dict[str, Any] = field(converter=dict, hash=False)

    def __call__(self, model: nn.Module) -> None:
        """Make the modules leaves; rank 0 warns of entries that fit no module. Local."""
        unknown = []
        for how in _FITS:
            said = self.section.get(how, ())
            wanted = (said,) if isinstance(said, str) else said
            for one, found in find_modules(model, wanted, how).items():
                for module in found:
                    set_leaf(module, True)
                if not found and one not in LEAF_CLASSES:
                    unknown.append(f"{how}: {one!r}")
        if unknown and not (dist.is_initialized() and dist.get_rank() > 0):
            warn_user(
                f"zero_optimization.leaf_module fits no module of this {type(model).__name__}: "
                f"{', '.join(unknown)}; nothing becomes a leaf by it. See model.named_modules()",
            )


def _is_of(_: str, module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    kind = type(module)
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


_FITS: Final[dict[str, Callable[[str, nn.Module, Any], bool]]] = {
    "classes": _is_of,
    "names": lambda name, _, wanted: name == wanted,
    "name_suffixes": lambda name, _, wanted: name.endswith(wanted),
}
