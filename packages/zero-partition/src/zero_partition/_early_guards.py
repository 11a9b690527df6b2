"""Modules whose parameters are early sharded refuse what would read stand-ins."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._construction import CURRENT
from ._early_shard import EarlyShard, find_early
from ._errors import StateError
from ._guards import end_empty_export, export_empty


def refuse_forward(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: before shard() there is a forward inside Init only."""
    name = next(iter(_stand_ins_of(module)), None)
    if name is not None and CURRENT.get() is None:
        raise StateError(
            f"forward of a {type(module).__name__} whose parameter {name!r} was sharded by "
            "Init: call zero_engine.shard(model, optimizer, config) first"
        )


def before_export(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """state_dict pre-hook: outside Init it would give stand-ins away."""
    stand_ins = _stand_ins_of(module)
    empty = [name for name, early in stand_ins.items() if early.exports_empty]
    name = next((name for name in stand_ins if name not in empty), None)
    if name is not None and CURRENT.get() is None:
        raise StateError(
            f"state_dict(): parameter {prefix + name!r} was sharded by Init: call "
            "zero_engine.shard(model, ...) first, and then "
            "zero_engine.full_state_dict(model) on every rank"
        )
    export_empty(module, () if keep_vars else empty)


def after_export(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    """state_dict post-hook: parameters are as before."""
    end_empty_export(module)


def _stand_ins_of(module: nn.Module) -> dict[str, EarlyShard]:
    """Of parameters of its own that Init sharded, and that are not whole now."""
    own = {name: find_early(p) for name, p in module._parameters.items() if p is not None}
    return {name: early for name, early in own.items() if early and not early.is_gathered}


def guard_module(module: nn.Module) -> None:
    """Let the module refuse what would read stand-ins. Plain functions: copies share them."""
    if refuse_forward not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(refuse_forward, prepend=True)
        module.register_state_dict_pre_hook(before_export)
        module.register_state_dict_post_hook(after_export)


def unguard_module(module: nn.Module) -> None:
    """Undo `guard_module`, if it was done."""
    for hooks, ours in (
        (module._forward_pre_hooks, refuse_forward),
        (module._state_dict_pre_hooks, before_export),
        (module._state_dict_hooks, after_export),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
