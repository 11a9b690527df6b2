"""ZeRO for a plain PyTorch loop: shard a model and its optimizer, keep the loop."""

from zero_comm import Loco
from zero_partition import (
    ChainedOptimizer,
    Cut,
    GatheredParameters,
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
    get_leaf_modules,
    load_full_optimizer_state_dict,
    local_grad,
    local_optimizer_state,
    local_param,
    no_sync,
    parameter_status,
    record_codec_errors,
    register_external_parameter,
    release_buffers,
    set_full_grad,
    set_full_optimizer_state,
    set_full_param,
    set_leaf_modules,
    set_local_grad,
    set_local_optimizer_state,
    set_local_param,
    unregister_external_parameter,
    unscale_and_clip_,
    unset_leaf_modules,
    unsharded,
    update_full_grads,
)

from zero_engine.checkpoint.background import Saver, Snapshot, StopSignals
from zero_engine.checkpoint.export import ExportReport, export
from zero_engine.checkpoint.load import LoadReport, load
from zero_engine.checkpoint.load_deepspeed import DeepSpeedLoadReport, load_deepspeed
from zero_engine.checkpoint.pretrained import load_pretrained, open_weights
from zero_engine.checkpoint.save import SaveReport, save
from zero_engine.deepspeed.engine import Engine
from zero_engine.deepspeed.engine_config import EngineConfig, NamedSpec
from zero_engine.deepspeed.initialize import initialize
from zero_engine.deepspeed.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from zero_engine.planning.estimate import Rates, StepEstimate, estimate_step
from zero_engine.planning.options import Option, Room, plan_options, recommend
from zero_engine.planning.plan import Plan, UnitRow, plan
from zero_engine.planning.probe import probe
from zero_engine.planning.sources import GPTSize
from zero_engine.planning.tables import options_table, plan_table, save_picture, times_table

from .__about__ import __version__
from .config import ZeroConfig
from .errors import ConfigError, FileError, LossScaleError, NotBuiltError
from .init import Init, materialise
from .loss_scale import DynamicLossScale, LossScaler, StaticLossScale
from .offload import Offload
from .report import report, schedule_table
from .sharding import shard, unshard
from .state_offload import offload_states, reload_states

__all__ = [
    "ChainedOptimizer",
    "ConfigError",
    "Cut",
    "DeepSpeedLoadReport",
    "DynamicLossScale",
    "Engine",
    "EngineConfig",
    "ExportReport",
    "FileError",
    "GPTSize",
    "GatheredParameters",
    "Init",
    "LRRangeTest",
    "LoadReport",
    "Loco",
    "LossScaleError",
    "LossScaler",
    "NamedSpec",
    "NotBuiltError",
    "Offload",
    "OneCycle",
    "Option",
    "Plan",
    "Precision",
    "Rates",
    "Room",
    "SaveReport",
    "Saver",
    "ShardedAverage",
    "Snapshot",
    "StaticLossScale",
    "StepEstimate",
    "StopSignals",
    "UnitRow",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "Wire",
    "ZeroConfig",
    "__version__",
    "backward_without_batch",
    "clip_grad_norm_",
    "clip_grad_value_",
    "coalesce_reduction",
    "estimate_step",
    "export",
    "finish_update",
    "full_grad",
    "full_optimizer_state",
    "full_optimizer_state_dict",
    "full_param",
    "full_state_dict",
    "get_leaf_modules",
    "initialize",
    "load",
    "load_deepspeed",
    "load_full_optimizer_state_dict",
    "load_pretrained",
    "local_grad",
    "local_optimizer_state",
    "local_param",
    "materialise",
    "no_sync",
    "offload_states",
    "open_weights",
    "options_table",
    "parameter_status",
    "plan",
    "plan_options",
    "plan_table",
    "probe",
    "recommend",
    "record_codec_errors",
    "register_external_parameter",
    "release_buffers",
    "reload_states",
    "report",
    "save",
    "save_picture",
    "schedule_table",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_full_param",
    "set_leaf_modules",
    "set_local_grad",
    "set_local_optimizer_state",
    "set_local_param",
    "shard",
    "times_table",
    "unregister_external_parameter",
    "unscale_and_clip_",
    "unset_leaf_modules",
    "unshard",
    "unsharded",
    "update_full_grads",
]
