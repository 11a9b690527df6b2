"""Names that scripts import from inside DeepSpeed, each with the object that it is here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Final, final

from zero_engine import ConfigError

_CHECKPOINTING: Final = {
    "zero_ckpt": (
        "CheckpointFunction checkpoint configure get_cuda_rng_tracker is_configured "
        "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed "
        "non_reentrant_checkpoint partition_activations_in_checkpoint reset set_num_layers"
    )
}
_OPTIMIZERS: Final = "zero_deepspeed.optimizers"
_ZERO: Final = "GatheredParameters Init register_external_parameter"

# Module of DeepSpeed -> module of ours -> its names there. "x=y" gives our x the name y.
NAMES: Final[dict[str, dict[str, str]]] = {
    "checkpoint": {},
    "checkpoint.utils": {"zero_deepspeed.weights": "clone_tensors_for_torch_save"},
    "checkpointing": _CHECKPOINTING,
    "ops": {},
    "ops.adagrad": {_OPTIMIZERS: "DeepSpeedCPUAdagrad"},
    "ops.adam": {_OPTIMIZERS: "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {_OPTIMIZERS: "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {_OPTIMIZERS: "FusedAdam"},
    "ops.lion": {_OPTIMIZERS: "DeepSpeedCPULion"},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.config": {"zero_engine": "ConfigError=DeepSpeedConfigError"},
    "runtime.dataloader": {"zero_deepspeed.parameters": "RepeatingLoader"},
    "runtime.engine": {"zero_engine": "Engine=DeepSpeedEngine"},
    "runtime.lr_schedules": {
        "zero_deepspeed.schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR"
    },
    "runtime.utils": {"zero_deepspeed.memory": "see_memory_usage"},
    "runtime.zero": {"zero_deepspeed.zero": _ZERO},
    "runtime.zero.offload_config": {
        "zero_deepspeed.zero": "OffloadDeviceEnum OffloadStateTypeEnum"
    },
    "runtime.zero.partition_parameters": {"zero_deepspeed.zero": f"{_ZERO} ZeroParamStatus"},
    "runtime.zero.stage3": {
        "zero_deepspeed.memory": (
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live"
        )
    },
    "runtime.zero.stage_1_and_2": {
        "zero_deepspeed.memory": (
            "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live"
        )
    },
    "runtime.zero.tiling": {"zero_deepspeed.tiling": "TiledLinear TiledLinearReturnBias"},
    "utils": {
        "zero_deepspeed.parameters": (
            "RepeatingLoader get_z3_leaf_modules log_dist logger safe_get_full_fp32_param "
            "safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
            "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param "
            "safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param "
            "safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized "
            "set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
            "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
        )
    },
    "utils.zero_to_fp32": {
        "zero_deepspeed.weights": (
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint"
        )
    },
}
# Modules of DeepSpeed that are files of this package.
_FILES: Final = ("accelerator", "comm", "zero")
_THEIRS: Final = "deepspeed"
_OURS: Final = "zero_deepspeed"


@final
class _Names(MetaPathFinder, Loader):
    """Importer of the table's modules: `zero_deepspeed.x`, and `deepspeed.x` as the same object."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        del path, target
        package, _, name = fullname.partition(".")
        if package != self._package:
            return None
        if name in NAMES or (name in _FILES and package == _THEIRS):
            return ModuleSpec(fullname, self, is_package=True)
        if package == _OURS:
            return None
        raise ModuleNotFoundError(
            f"No module named {fullname!r}: `import deepspeed` is {_OURS} here, by "
            f"deepspeed.install(); what there is: "
            f"{', '.join(f'{_THEIRS}.{each}' for each in sorted([*NAMES, *_FILES]))}",
            name=fullname,
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self._package == _OURS:
            return None
        module = import_module(_OURS + spec.name.removeprefix(_THEIRS))
        # The import system is about to replace the module's own spec.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._package == _THEIRS:
            assert module.__spec__ is not None, "the import system has just set it"
            module.__spec__ = module.__spec__.loader_state
            return
        found = {}
        for source, names in NAMES[module.__name__.removeprefix(f"{_OURS}.")].items():
            for name in names.split():
                there, _, here = name.partition("=")
                found[here or there] = getattr(import_module(source), there)
        vars(module).update(found, __all__=sorted(found))
        module.__doc__ = f"{_THEIRS}{module.__name__.removeprefix(_OURS)}: {', '.join(found)}."


def make_modules() -> None:
    """Import every module of the table, as an attribute of the module that encloses it. Local."""
    # At the end, so that files are found first.
    sys.meta_path.append(_Names(_OURS))
    for name in NAMES:
        import_module(f"{_OURS}.{name}")


def install() -> None:
    """Let `import deepspeed` and `from deepspeed.x import y` find this package. Local.

    For the whole process, from now on: call it first in the script, in every process of the job.
    Modules are the same objects by both names. A second call changes nothing. Code that looks for
    DeepSpeed's distribution (`importlib.metadata`), as transformers and accelerate do, finds none.

    Raises:
        zero_engine.ConfigError: DeepSpeed itself is installed; or another module has its name.
    """
    if sys.modules.get(_THEIRS) is sys.modules[_OURS]:
        return
    loaded = sys.modules.get(_THEIRS)
    spec = None if loaded is not None else find_spec(_THEIRS)
    origin = getattr(loaded, "__file__", loaded) if spec is None else spec.origin
    # None for a folder without __init__.py, such as that of "deepspeed/ds_config.json".
    if origin is not None:
        raise ConfigError(
            f"deepspeed.install(): expected that DeepSpeed is not installed, got {origin}; remove "
            "it (pip uninstall deepspeed), or leave install() out and write `import "
            f"{_OURS} as deepspeed`"
        )
    # At the start: another finder would load our files a second time.
    sys.meta_path.insert(0, _Names(_THEIRS))
    sys.modules[_THEIRS] = sys.modules[_OURS]
