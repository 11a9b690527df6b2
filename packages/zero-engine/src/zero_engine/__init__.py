"""ZeRO for a plain PyTorch loop: shard a model and its optimizer, keep the loop."""

# Layers, lowest first: errors, moved, torch_private, checks, offload, readers, config,
# state_offload, reports, failure, planning, sharding, checkpoint, observe, engine, integrations,
# commands, cli, testing.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from zero_engine import moved
from zero_engine.__about__ import __version__

if TYPE_CHECKING:
    from zero_comm import Loco
    from zero_partition import (
        ChainedOptimizer,
        Cut,
        GatheredParameters,
        ModulePrecision,
        Precision,
        ShardedAverage,
        Wire,
        backward_without_batch,
        clip_grad_norm_,
        clip_grad_value_,
        coalesce_reduction,
        finish_update,
        full_grad,
        full_optimizer_state,
        full_optimizer_state_dict,
        full_param,
        full_state_dict,
        load_full_optimizer_state_dict,
        local_grad,
        local_optimizer_state,
        local_param,
        memory_report,
        no_sync,
        release_buffers,
        set_full_grad,
        set_full_optimizer_state,
        set_full_param,
        set_local_grad,
        set_local_optimizer_state,
        set_local_param,
        unscale_and_clip_,
        unsharded,
        update_full_grads,
    )

    from zero_engine.checkpoint.background import Saver
    from zero_engine.checkpoint.export import export
    from zero_engine.checkpoint.load import load, load_deepspeed
    from zero_engine.checkpoint.pretrained import load_pretrained
    from zero_engine.checkpoint.save import save
    from zero_engine.config import ZeroConfig
    from zero_engine.engine.engine import Engine
    from zero_engine.engine.initialize import initialize
    from zero_engine.errors import ConfigError, FileError, LossScaleError, NotBuiltError
    from zero_engine.observe.metrics import metrics
    from zero_engine.observe.timeline import timeline
    from zero_engine.observe.verify import verify
    from zero_engine.offload import Offload
    from zero_engine.planning.plan import plan
    from zero_engine.reports import report, schedule_table
    from zero_engine.sharding import Init, materialise, shard, unshard
    from zero_engine.state_offload import offload_states, reload_states

__all__ = [
    "ChainedOptimizer",
    "ConfigError",
    "Cut",
    "Engine",
    "FileError",
    "GatheredParameters",
    "Init",
    "Loco",
    "LossScaleError",
    "ModulePrecision",
    "NotBuiltError",
    "Offload",
    "Precision",
    "Saver",
    "ShardedAverage",
    "Wire",
    "ZeroConfig",
    "__version__",
    "backward_without_batch",
    "clip_grad_norm_",
    "clip_grad_value_",
    "coalesce_reduction",
    "export",
    "finish_update",
    "full_grad",
    "full_optimizer_state",
    "full_optimizer_state_dict",
    "full_param",
    "full_state_dict",
    "initialize",
    "load",
    "load_deepspeed",
    "load_full_optimizer_state_dict",
    "load_pretrained",
    "local_grad",
    "local_optimizer_state",
    "local_param",
    "materialise",
    "memory_report",
    "metrics",
    "no_sync",
    "offload_states",
    "plan",
    "release_buffers",
    "reload_states",
    "report",
    "save",
    "schedule_table",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_full_param",
    "set_local_grad",
    "set_local_optimizer_state",
    "set_local_param",
    "shard",
    "timeline",
    "unscale_and_clip_",
    "unshard",
    "unsharded",
    "update_full_grads",
    "verify",
]

# Where a name is; loaded on first use.
_NAMES: Final = {
    "zero_comm": "Loco",
    "zero_engine.checkpoint.background": "Saver",
    "zero_engine.checkpoint.export": "export",
    "zero_engine.checkpoint.load": "load load_deepspeed",
    "zero_engine.checkpoint.pretrained": "load_pretrained",
    "zero_engine.checkpoint.save": "save",
    "zero_engine.config": "ZeroConfig",
    "zero_engine.engine.engine": "Engine",
    "zero_engine.engine.initialize": "initialize",
    "zero_engine.errors": "ConfigError FileError LossScaleError NotBuiltError",
    "zero_engine.observe.metrics": "metrics",
    "zero_engine.observe.timeline": "timeline",
    "zero_engine.observe.verify": "verify",
    "zero_engine.offload": "Offload",
    "zero_engine.planning.plan": "plan",
    "zero_engine.reports": "report schedule_table",
    "zero_engine.sharding": "Init materialise shard unshard",
    "zero_engine.state_offload": "offload_states reload_states",
    "zero_partition": (
        "ChainedOptimizer Cut GatheredParameters ModulePrecision Precision ShardedAverage Wire "
        "backward_without_batch clip_grad_norm_ clip_grad_value_ coalesce_reduction "
        "finish_update full_grad full_optimizer_state full_optimizer_state_dict full_param "
        "full_state_dict load_full_optimizer_state_dict local_grad local_optimizer_state "
        "local_param memory_report no_sync release_buffers set_full_grad "
        "set_full_optimizer_state set_full_param set_local_grad "
        "set_local_optimizer_state set_local_param unscale_and_clip_ unsharded "
        "update_full_grads"
    ),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

moved.install()


def __getattr__(name: str) -> Any:
    """Load what a name needs when it is first asked for (PEP 562)."""
    if name in {"checkpoint", "engine", "planning"}:
        return import_module(f"zero_engine.{name}")
    if name not in _MODULES:
        return moved.find(__name__, name)
    found = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
