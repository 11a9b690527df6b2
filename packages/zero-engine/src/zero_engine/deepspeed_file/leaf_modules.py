"""Leaf modules in the three ways in which DeepSpeed's files and functions name them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from weakref import WeakSet

from torch import nn
from zero_partition import get_leaf_modules, set_leaf_modules, unset_leaf_modules

# What a file that says nothing makes leaves of: as in DeepSpeed, classes of transformers.
LEAF_CLASSES: Final = tuple(
    f"transformers.models.{model}.modeling_{model}.{name}SparseMoeBlock"
    for model, name in (
        ("mixtral", "Mixtral"),
        ("qwen2_moe", "Qwen2Moe"),
        ("qwen3_moe", "Qwen3Moe"),
    )
)

_SET: Final[WeakSet[nn.Module]] = WeakSet()  # here: to ask of a parameter alone, without a model


def find_by_class(
    model: nn.Module, classes: Sequence[type[nn.Module] | str]
) -> tuple[list[nn.Module], list[Any]]:
    """Modules of these classes, inner ones first, and the classes that fit none.

    A class that is named is that very class, by its name alone or after its module's.
    """
    fitting = {one: [m for m in _inner_first(model) if _is_of(m, one)] for one in classes}
    found = {module for modules in fitting.values() for module in modules}
    in_order = dict.fromkeys(module for module in _inner_first(model) if module in found)
    return list(in_order), [one for one, modules in fitting.items() if not modules]


def find_by_name(
    model: nn.Module,
    wanted: Sequence[str],
    fits: Callable[[str, str], bool] = str.__eq__,
) -> tuple[list[nn.Module], list[str]]:
    """Modules whose name in `named_modules()` fits, in the order wanted, and what fits none."""
    modules = dict(model.named_modules())
    fitting = {one: [m for name, m in modules.items() if fits(name, one)] for one in wanted}
    found = dict.fromkeys(module for of_one in fitting.values() for module in of_one)
    return list(found), [one for one, of_one in fitting.items() if not of_one]


def set_leaf(module: nn.Module, is_leaf: bool) -> None:
    """Make this very module a leaf, or no leaf."""
    (set_leaf_modules if is_leaf else unset_leaf_modules)(module, "")  # in its own named_modules()
    (_SET.add if is_leaf else _SET.discard)(module)


def holds_parameter(param: nn.Parameter) -> bool:
    """Whether it belongs to a module that `set_leaf` made a leaf, which it still is."""
    leaves = [module for module in _SET if module in get_leaf_modules(module)]
    return any(one is param for leaf in leaves for one in leaf.parameters())


def set_as_file_says(model: nn.Module, section: Mapping[str, Any], *, warns: bool) -> None:
    """Set what `zero_optimization.leaf_module` names; warn of what fits no module. Local."""
    wanted = {
        key: (said,) if isinstance(said, str) else tuple(said) for key, said in section.items()
    }
    unknown = []
    for key, (found, missing) in {
        "classes": find_by_class(model, wanted.get("classes", ())),
        "names": find_by_name(model, wanted.get("names", ())),
        "name_suffixes": find_by_name(model, wanted.get("name_suffixes", ()), str.endswith),
    }.items():
        for module in found:
            set_leaf(module, True)
        unknown += [f"{key}: {one!r}" for one in missing if one not in LEAF_CLASSES]
    if unknown and warns:
        warnings.warn(
            f"zero_optimization.leaf_module fits no module of this {type(model).__name__}: "
            f"{', '.join(unknown)}; nothing becomes a leaf by it. See model.named_modules()",
            stacklevel=3,
        )


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _is_of(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    kind = type(module)
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
