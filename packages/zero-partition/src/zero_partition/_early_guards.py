"""Modules whose parameters are early sharded refuse what would read stand-ins."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._construction import CURRENT
from ._early_shard import find_early
from ._errors import StateError


def refuse_forward(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: before shard() there is a forward inside Init only."""
    name = _first_early(module)
    if name is not None:
        raise StateError(
            f"forward of a {type(module).__name__} whose parameter {name!r} was sharded by "
            "Init: call zero_engine.shard(model, optimizer, config) first"
        )


def refuse_export(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """state_dict pre-hook: outside Init it would give stand-ins away."""
    name = _first_early(module)
    if name is not None:
        raise StateError(
            f"state_dict(): parameter {prefix + name!r} was sharded by Init: call "
            "zero_engine.shard(model, ...) first, and then "
            "zero_engine.full_state_dict(model) on every rank"
        )


def _first_early(module: nn.Module) -> str | None:
    """A parameter of its own that Init sharded; None inside Init, where that is as it should be."""
    own = module._parameters.items() if CURRENT.get() is None else ()
    return next((name for name, param in own if param is not None and _is_stand_in(param)), None)


def _is_stand_in(param: nn.Parameter) -> bool:
    early = find_early(param)
    return early is not None and not early.is_gathered


def guard_module(module: nn.Module) -> None:
    """Let the module refuse what would read stand-ins. Plain functions: copies share them."""
    if refuse_forward not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(refuse_forward, prepend=True)
        module.register_state_dict_pre_hook(refuse_export)


def unguard_module(module: nn.Module) -> None:
    """Undo `guard_module`, if it was done."""
    for hooks, ours in (
        (module._forward_pre_hooks, refuse_forward),
        (module._state_dict_pre_hooks, refuse_export),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
