"""deepspeed.utils: parameters, gradients and optimizer state of a sharded model; leaf modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from weakref import WeakSet

from torch import Tensor, nn

import zero_engine
from zero_engine import ConfigError

from .comm import get_rank

Classes = type[nn.Module] | str | Sequence[type[nn.Module] | str]

logger: Final = logging.getLogger("zero_engine.compat.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all of them when None, or where -1 is among them. Local."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[rank %d] %s", get_rank(), message)


# ---- Whole values: every rank calls these, between backward and step ----


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole value, in fp32. Collective."""
    value = zero_engine.full_param(param)
    return None if value is None else value.float()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient, averaged over the ranks. Collective. See `zero_engine.full_grad`."""
    return zero_engine.full_grad(param)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """The whole of one entry, "exp_avg" say. Collective."""
    return zero_engine.full_optimizer_state(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole value, the same on every rank."""
    zero_engine.set_full_param(param, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole gradient, the same on every rank."""
    zero_engine.set_full_grad(param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    """Write the whole of one entry, the same on every rank."""
    zero_engine.set_full_optimizer_state(param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace many gradients by what `update_func(gradient, param)` returns. Collective."""
    zero_engine.update_full_grads(param_list, lambda param, grad: update_func(grad, param))


# ---- This rank's part ----


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """This rank's part of the value, 1-D, in fp32."""
    return zero_engine.local_param(param).float()


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the averaged gradient, 1-D."""
    return zero_engine.local_grad(param)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """This rank's part of one entry."""
    return zero_engine.local_optimizer_state(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of the value. Every rank calls it."""
    zero_engine.set_local_param(param, value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of the gradient. Every rank calls it."""
    zero_engine.set_local_grad(param, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    """Write this rank's part of one entry. Every rank calls it."""
    zero_engine.set_local_optimizer_state(param, optim_state_key, value)


# ---- Leaf modules ----

_LEAVES: Final[WeakSet[nn.Module]] = WeakSet()  # set by this file: `z3_leaf_parameter` has no model


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Classes) -> list[nn.Module]:
    """`zero_engine.set_leaf_modules`: before `initialize`, on every rank. Returns those found."""
    found = zero_engine.set_leaf_modules(model, leaf_module_classes)
    _LEAVES.update(found)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Classes) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`, before `initialize`."""
    return zero_engine.unset_leaf_modules(model, leaf_module_classes)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: str | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The same for whole names, as in `model.named_modules()`. Returns those found."""
    return _set(model, module_names, raise_if_not_found, lambda name, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_suffixes: str | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The same for ends of names. Returns those found."""
    return _set(model, module_suffixes, raise_if_not_found, lambda name, end: name.endswith(end))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this very module a leaf, or no leaf."""
    change = set_z3_leaf_modules if flag else unset_z3_leaf_modules
    change(model, "")  # its own name in its own named_modules()


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaf modules in `model`, in its order."""
    return zero_engine.get_leaf_modules(model)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this very module is a leaf."""
    return any(leaf is model for leaf in zero_engine.get_leaf_modules(model))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether this parameter belongs to a module that a function of this file made a leaf."""
    return any(
        param is model for leaf in _LEAVES if z3_leaf_module(leaf) for param in leaf.parameters()
    )


def _set(
    model: nn.Module, wanted: str | Sequence[str], raises: bool, fits: Callable[[str, str], bool]
) -> list[nn.Module]:
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    modules = dict(model.named_modules())
    missing = [one for one in wanted if not any(fits(name, one) for name in modules)]
    if missing and raises:
        raise ConfigError(
            f"expected names of modules, as in model.named_modules(), or their ends, got "
            f"{missing!r}, which fit none of this {type(model).__name__}"
        )
    found = [module for name, module in modules.items() if any(fits(name, one) for one in wanted)]
    for module in found:
        set_z3_leaf_module(module, True)
    return found
