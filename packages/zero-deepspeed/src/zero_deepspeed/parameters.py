"""deepspeed.utils: parameters, gradients and state of a sharded model; leaf modules; logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import zero_engine
import zero_partition
from torch import Tensor, nn
from zero_engine import ConfigError

from .comm import get_rank
from .leaf_modules import (
    find_modules,
    is_in_leaf,
    set_leaf,
)

Classes = type[nn.Module] | str | Sequence[type[nn.Module] | str]

logger: Final = logging.getLogger("zero_deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all of them when None, or where -1 is among them. Local."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[rank %d] %s", get_rank(), message)


class RepeatingLoader:
    """Iterates over a loader again and again, without an end.

    Args:
        loader: Anything that can be iterated over several times.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


# As in DeepSpeed, functions that read return None for a frozen parameter.


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole value, in fp32. Collective."""
    value = zero_engine.full_param(param) if param.requires_grad else None
    return None if value is None else value.float()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient, the mean over ranks. Collective. See `zero_engine.full_grad`."""
    return zero_engine.full_grad(param) if param.requires_grad else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """Return one whole entry of the optimizer state, "exp_avg" say. Collective."""
    if not param.requires_grad:
        return None
    return zero_engine.full_optimizer_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    """Write one whole entry of the optimizer state, the same on every rank."""
    zero_engine.set_full_optimizer_state(param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace many gradients by what `update_func(gradient, param)` returns. Collective."""
    zero_engine.update_full_grads(param_list, lambda param, grad: update_func(grad, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of the value, 1-D, in fp32."""
    return zero_engine.local_param(param).float() if param.requires_grad else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of the averaged gradient, 1-D."""
    return zero_engine.local_grad(param) if param.requires_grad else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """Return this rank's shard of one entry of the optimizer state."""
    if not param.requires_grad:
        return None
    return zero_engine.local_optimizer_state(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    """Write this rank's shard of one entry of the optimizer state. Every rank calls it."""
    zero_engine.set_local_optimizer_state(param, optim_state_key, value)


# As in zero_engine, every rank calls these, with the same whole value or with its shard.
safe_set_full_fp32_param = zero_engine.set_full_param
safe_set_full_grad = zero_engine.set_full_grad
safe_set_local_fp32_param = zero_engine.set_local_param
safe_set_local_grad = zero_engine.set_local_grad


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make modules of these classes leaves. Returns them, inner ones first. Local.

    Args:
        model: A model, or any part of it.
        leaf_module_classes: Classes, of which subclasses count, or names of the very class:
            "MixtralSparseMoeBlock", or with the module it is defined in before it.
        raise_if_not_found: Whether it is an error that not one fits.

    Raises:
        zero_engine.ConfigError: Not one fits.
    """
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make modules of these classes no leaves. Returns all that fit, leaves or not. Local."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: str | Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Make modules leaves, or no leaves, by whole names, as in `model.named_modules()`. Local.

    Returns:
        The modules, in the order of the names, and the names that no module has.

    Raises:
        zero_engine.ConfigError: A name fits none, and that is an error; nothing was set.
    """
    return _set_by_name(model, module_names, "names", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: str | Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Make modules leaves, or no leaves, by the ends of their names. Local.

    Returns and raises as `set_z3_leaf_modules_by_name`.
    """
    return _set_by_name(model, module_name_suffixes, "name_suffixes", flag, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this very module a leaf, or no leaf."""
    set_leaf(model, flag)


get_z3_leaf_modules = zero_partition.get_leaf_modules


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this very module is a leaf."""
    return any(leaf is model for leaf in zero_partition.get_leaf_modules(model))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return whether a parameter is in a leaf that this file's functions or a configuration set."""
    return is_in_leaf(model)


def _set_by_class(
    model: nn.Module, classes: Classes, is_leaf: bool, raises: bool
) -> list[nn.Module]:
    classes = [classes] if isinstance(classes, type | str) else list(classes)
    for one in classes:
        if not isinstance(one, type | str):
            raise ConfigError(f"expected classes of modules or names of classes, got {one!r}")
    fitting = {m for modules in find_modules(model, classes, "classes").values() for m in modules}
    if raises and not fitting:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"expected classes of modules in this {type(model).__name__}, got {classes!r}, of "
            f"which there is none; there are {', '.join(known)}"
        )
    found = [module for module in dict.fromkeys(_inner_first(model)) if module in fitting]
    for module in found:
        set_leaf(module, is_leaf)
    return found


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _set_by_name(
    model: nn.Module, wanted: str | Sequence[str], how: str, is_leaf: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    fitting = find_modules(model, [wanted] if isinstance(wanted, str) else wanted, how)
    missing = [one for one, modules in fitting.items() if not modules]
    if missing and raises:
        raise ConfigError(
            f"expected names of modules, as in model.named_modules(), or their ends, got "
            f"{missing!r}, which fit none of this {type(model).__name__}"
        )
    found = list(dict.fromkeys(module for modules in fitting.values() for module in modules))
    for module in found:
        set_leaf(module, is_leaf)
    return found, missing
