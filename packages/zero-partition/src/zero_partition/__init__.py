"""ZeRO stages 0 to 3: which rank owns which elements of a model, and when units are gathered."""

# Layers, lowest first: errors, torch_private, nested, chained, plan, dtensors, stand_in, memory,
# init, run, sanitize, optimizer, values, setup, report, dry_run, redundancy, public, planning,
# seams.

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from zero_partition.__about__ import __version__

if TYPE_CHECKING:
    from zero_partition.chained import ChainedOptimizer
    from zero_partition.errors import (
        LayoutError,
        LoadError,
        LostEditError,
        OverlapError,
        PartitionError,
        ShardedParamError,
        StateError,
    )
    from zero_partition.init.context import Init
    from zero_partition.init.materialize import materialise
    from zero_partition.init.units import get_leaf_modules, set_leaf_modules, unset_leaf_modules
    from zero_partition.memory.seams import MASTER
    from zero_partition.plan.cuts import Cut
    from zero_partition.plan.precision import AS_IT_IS, ModulePrecision, Precision
    from zero_partition.plan.wire import Wire
    from zero_partition.public import (
        backward_without_batch,
        coalesce_reduction,
        finish_update,
        no_sync,
        record_codec_errors,
        release_buffers,
    )
    from zero_partition.redundancy import ZeroRedundancyOptimizer
    from zero_partition.report import (
        MemoryReport,
        ScheduleReport,
        ScheduleRow,
        memory_report,
        schedule_report,
        traffic_report,
    )
    from zero_partition.run.norm import clip_grad_norm_, clip_grad_value_, unscale_and_clip_
    from zero_partition.setup.life_cycle import unpartition
    from zero_partition.setup.partition import partition
    from zero_partition.stand_in import StateKind
    from zero_partition.values.access import (
        full_grad,
        full_optimizer_state,
        full_param,
        local_grad,
        local_optimizer_state,
        local_param,
        parameter_status,
        set_full_grad,
        set_full_optimizer_state,
        set_full_param,
        set_local_grad,
        set_local_optimizer_state,
        set_local_param,
        update_full_grads,
    )
    from zero_partition.values.average import ShardedAverage
    from zero_partition.values.gathered import (
        GatheredParameters,
        register_external_parameter,
        unregister_external_parameter,
        unsharded,
    )
    from zero_partition.values.state_dict import (
        full_optimizer_state_dict,
        full_state_dict,
        load_full_optimizer_state_dict,
    )

__all__ = [
    "AS_IT_IS",
    "MASTER",
    "ChainedOptimizer",
    "Cut",
    "GatheredParameters",
    "Init",
    "LayoutError",
    "LoadError",
    "LostEditError",
    "MemoryReport",
    "ModulePrecision",
    "OverlapError",
    "PartitionError",
    "Precision",
    "ScheduleReport",
    "ScheduleRow",
    "ShardedAverage",
    "ShardedParamError",
    "StateError",
    "StateKind",
    "Wire",
    "ZeroRedundancyOptimizer",
    "__version__",
    "backward_without_batch",
    "clip_grad_norm_",
    "clip_grad_value_",
    "coalesce_reduction",
    "finish_update",
    "full_grad",
    "full_optimizer_state",
    "full_optimizer_state_dict",
    "full_param",
    "full_state_dict",
    "get_leaf_modules",
    "load_full_optimizer_state_dict",
    "local_grad",
    "local_optimizer_state",
    "local_param",
    "materialise",
    "memory_report",
    "no_sync",
    "parameter_status",
    "partition",
    "record_codec_errors",
    "register_external_parameter",
    "release_buffers",
    "schedule_report",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_full_param",
    "set_leaf_modules",
    "set_local_grad",
    "set_local_optimizer_state",
    "set_local_param",
    "traffic_report",
    "unpartition",
    "unregister_external_parameter",
    "unscale_and_clip_",
    "unset_leaf_modules",
    "unsharded",
    "update_full_grads",
]

# Module -> public names in it, which are loaded on first use.
_NAMES: Final = {
    "zero_partition.chained": "ChainedOptimizer",
    "zero_partition.setup.life_cycle": "unpartition",
    "zero_partition.setup.partition": "partition",
    "zero_partition.errors": (
        "LayoutError LoadError LostEditError OverlapError PartitionError ShardedParamError "
        "StateError"
    ),
    "zero_partition.init.context": "Init",
    "zero_partition.init.materialize": "materialise",
    "zero_partition.init.units": "get_leaf_modules set_leaf_modules unset_leaf_modules",
    "zero_partition.memory.seams": "MASTER",
    "zero_partition.plan.cuts": "Cut",
    "zero_partition.plan.precision": "AS_IT_IS ModulePrecision Precision",
    "zero_partition.plan.wire": "Wire",
    "zero_partition.public": (
        "backward_without_batch coalesce_reduction finish_update no_sync record_codec_errors "
        "release_buffers"
    ),
    "zero_partition.redundancy": "ZeroRedundancyOptimizer",
    "zero_partition.report": (
        "MemoryReport ScheduleReport ScheduleRow memory_report schedule_report traffic_report"
    ),
    "zero_partition.run.norm": "clip_grad_norm_ clip_grad_value_ unscale_and_clip_",
    "zero_partition.stand_in": "StateKind",
    "zero_partition.values.access": (
        "full_grad full_optimizer_state full_param local_grad local_optimizer_state "
        "local_param parameter_status set_full_grad set_full_optimizer_state set_full_param "
        "set_local_grad set_local_optimizer_state set_local_param update_full_grads"
    ),
    "zero_partition.values.average": "ShardedAverage",
    "zero_partition.values.gathered": (
        "GatheredParameters register_external_parameter unregister_external_parameter unsharded"
    ),
    "zero_partition.values.state_dict": (
        "full_optimizer_state_dict full_state_dict load_full_optimizer_state_dict"
    ),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}
_MOVED: Final = {  # since 0.1
    "AtRestError": "zero_partition.ShardedParamError",
    "STAGES": "zero_partition.plan.STAGES",
    "Stage": "zero_partition.plan.Stage",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first access (PEP 562)."""
    if name in _MOVED:
        warnings.warn(
            f"zero_partition.{name} is {_MOVED[name]} now; zero 0.3 forgets the old name",
            DeprecationWarning,
            stacklevel=2,
        )
        module, _, attribute = _MOVED[name].rpartition(".")
    elif name in _MODULES:
        module, attribute = _MODULES[name], name
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(module), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
