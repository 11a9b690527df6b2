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

from .__about__ import __version__
from ._config import ZeroConfig
from ._construct import Init, materialise
from ._engine import Engine
from ._engine_config import EngineConfig, NamedSpec
from ._errors import ConfigError, FileError, LossScaleError, NotBuiltError
from ._estimate import StepEstimate, estimate_step
from ._export import ExportReport, export
from ._initialize import initialize
from ._load import LoadReport, load
from ._load_deepspeed import DeepSpeedLoadReport, load_deepspeed
from ._loss_scale import DynamicLossScale, LossScaler, StaticLossScale
from ._offload import Offload
from ._parking import offload_states, reload_states
from ._plan import Plan, UnitRow, plan
from ._plan_options import Option, Room, plan_options, recommend
from ._plan_picture import save_picture
from ._plan_source import GPTSize
from ._plan_table import options_table, plan_table, times_table
from ._pretrained import load_pretrained, open_weights
from ._probe import probe
from ._rates import Rates
from ._save import SaveReport, save
from ._saver import Saver, Snapshot
from ._schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from ._shard import shard, unshard
from ._stop_signals import StopSignals
from ._tables import report, schedule_table

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
