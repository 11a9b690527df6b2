"""Accelerate's loop with ZeRO: `Accelerator(...)` becomes `ZeroAccelerator(zero=..., ...)`.

Of Accelerate's own names it uses the attributes `_models` and `_optimizers`, what is prepared, and
`_prepare_tp`, which follows parameters of a model by their addresses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ParallelismConfig, parse_flag_from_env
from torch import Tensor, nn
from zero_comm import AnyRanks, Group
from zero_comm.logs import warn_user
from zero_partition import set_leaf_modules
from zero_partition.plan import Placement
from zero_partition.seams import ShardedModel, find_sharded

import zero_engine
from zero_engine import ConfigError, Precision, ZeroConfig
from zero_engine.torch_private import accelerator

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Arguments for other ways to distribute a model. Variables ACCELERATE_USE_... set them, too.
_OTHERS: Final = ("fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")


class ZeroAccelerator(Accelerator):
    """An `accelerate.Accelerator` whose `prepare` shards models and optimizers in place.

    For a model, `prepare` returns the same module, without a wrapper.
    `mixed_precision` is Accelerate's autocast, over parameters as they are; where a
    `DeepSpeedPlugin` says it, parameters that have an optimizer are kept in 16 bits with sharded
    fp32 masters, as with `ZeroConfig(precision=Precision(params=...))`. On a machine without an
    accelerator it sets `cpu=True`, so that torchrun's ranks meet.

    Collective, beside what is so in Accelerate: `prepare`, `clip_grad_norm_`, `get_state_dict`,
    `save_model`, `save_state` and `load_state`.

    With `parallelism_config`, parameters are sharded over the ranks of `dp_shard`, with replicas
    over those of `dp_replicate`, and over these where there is no `dp_shard`. A model that is split
    over `tp` is passed as `parallelize_module` or transformers has left it.

    Args:
        zero: How to distribute. When None, what a `DeepSpeedPlugin` says, given as
            `deepspeed_plugin` or by the launcher, and `ZeroConfig()`, stage 3, without one.
        **kwargs: As for `Accelerator`.

    Raises:
        ConfigError: Arguments or the environment ask for what cannot be together.
    """

    def __init__(self, *, zero: ZeroConfig | None = None, **kwargs: Any) -> None:
        for name in _OTHERS:
            variable = f"ACCELERATE_USE_{name.removesuffix('_plugin').upper()}"
            if kwargs.get(name) is not None or parse_flag_from_env(variable):
                raise ConfigError(
                    f"ZeroAccelerator: expected no {name}, and no {variable} in the environment: "
                    "it distributes in its own way; leave it out, in the launcher's settings too"
                )
        _check_axes(kwargs)
        self._plugin = _take_plugin(kwargs, zero)
        self._zero = ZeroConfig() if zero is None else zero
        # Optimizers that were passed to `prepare`, while it runs.
        self._given: list[torch.optim.Optimizer] = []
        # Sharded models, while `save_state` or `load_state` runs.
        self._aside: list[ShardedModel] = []
        if accelerator() is None:
            kwargs["cpu"] = True
        super().__init__(**kwargs)
        config = {} if self._plugin is None else self._plugin.deepspeed_config
        numbers = [config.get(f"gradient_{name}") for name in ("accumulation_steps", "clipping")]
        steps, self._max_norm = (n if isinstance(n, int | float) else 0 for n in numbers)
        # Accelerate sets 1 for no accumulation. As there, the plugin's number takes precedence.
        if steps > 1:
            self.gradient_accumulation_steps = int(steps)
        processes, dtype = os.environ.get("WORLD_SIZE", "1"), self.mixed_precision
        if int(processes) > self.num_processes:
            raise ConfigError(
                f"ZeroAccelerator: expected the {processes} processes of WORLD_SIZE, got "
                f"{self.num_processes}; a PartialState made before it on CPUs needs cpu=True"
            )
        is_unscaled = dtype == "fp16" and self.scaler is None
        if dtype == "fp8" or (is_unscaled and self._plugin is not None):
            raise ConfigError(
                "ZeroAccelerator: expected mixed_precision 'no' or 'bf16', or 'fp16' on a GPU, got "
                f"{dtype!r} on {self.device}, where Accelerate has no loss scale; say 'bf16'"
            )
        if is_unscaled:
            warn_user(
                "ZeroAccelerator: Accelerate has no autocast to fp16 on CPUs and trains in the "
                "dtype of the parameters there; mixed_precision='bf16' has one",
            )
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does, in any order, and shard models. Collective.

        A model's optimizer is passed in the same call or in an earlier one.

        Raises:
            ConfigError: A model has an optimizer in a later call, is quantized or spread by
                `device_map`, or would be compiled as a whole at stage 3.
            zero_partition.PartitionError: A model or optimizer cannot be sharded as it is, or was
                sharded or wrapped before.
        """
        given = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        self._given = [each for each in given if each not in self._optimizers]
        ready = [self.prepare_model(each) if isinstance(each, nn.Module) else each for each in args]
        self._given = []
        return super().prepare(*ready, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model with its optimizer, as `prepare` does, but in `evaluation_mode`."""
        is_ours = model in self._models or self._find(model) is not None
        if evaluation_mode or (is_ours and hasattr(model, "_is_accelerate_prepared")):
            return super().prepare_model(model, device_placement, evaluation_mode)
        known = [*self._given, *(each.optimizer for each in self._optimizers)]
        optimizers = [each for each in known if _updates(each, model)]
        config = self._config_of(model, is_trained=bool(optimizers))
        # The device as tensors have it: for "cpu:0" that is "cpu".
        device = torch.empty(0, device=self.device).device
        if any(tensor.device != device for tensor in chain(model.parameters(), model.buffers())):
            model.to(self.device)
            # Loading an optimizer's own state moves it to the parameters' devices.
            for optimizer in optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
        several: Any = optimizers if len(optimizers) > 1 else next(iter(optimizers), None)
        zero_engine.shard(model, several, config, group=self._ranks(device))

        def clip(*_: Any) -> None:
            zero_engine.clip_grad_norm_(model, self._max_norm)

        # As in DeepSpeed, each step clips if the plugin's file asks for it.
        for optimizer in optimizers if self._max_norm else ():
            optimizer.register_step_pre_hook(clip)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Wrap an optimizer, of which no rank's state is asked for; its state went with a model."""
        for found in self._sharded():
            known = (*_optimizers_of(found), *self._optimizers)
            if optimizer not in known and _updates(optimizer, found.model):
                raise ConfigError(
                    f"prepare(): expected a {type(optimizer).__name__} together with its model, "
                    f"got one of a {type(found.model).__name__} that is sharded already; call "
                    "prepare(model, optimizer, ...)"
                )
        return super().prepare_optimizer(optimizer, device_placement=False)

    @property
    def multi_device(self) -> bool:
        """Return whether there are several ranks; on CPUs only where their axes are named."""
        has_axes = self.parallelism_config is not None
        return super().multi_device or (has_axes and self.use_distributed)

    def _prepare_tp(self, *args: Any) -> Any:
        """Leave optimizers as they are: parameters are sharded, and have no memory to know by."""
        return args

    def _ranks(self, device: torch.device) -> AnyRanks | None:
        """Return the ranks that have the same part of a model; None: all of the job."""
        mesh = self.torch_device_mesh
        if mesh is None:
            return None
        names = [name for name in ("dp_replicate", "dp_shard") if name in mesh.mesh_dim_names]
        if not names:
            return Group.solo(device)
        return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]

    def _config_of(self, model: nn.Module, *, is_trained: bool) -> ZeroConfig:
        if self.verify_device_map(model):
            raise ConfigError(
                f"prepare(): expected a model on one device, got a {type(model).__name__} that is "
                "spread over several; load it without device_map"
            )
        config = self._zero
        if self._plugin is not None:
            config = ZeroConfig.from_deepspeed(self._plugin.deepspeed_config, model=model)
            launched = os.environ.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
            if names := self._plugin.transformer_moe_cls_names or launched:
                set_leaf_modules(model, names.split(","))
        dynamo: Any = self.state.dynamo_plugin
        is_whole = dynamo.backend.value != "NO" and not dynamo.use_regional_compilation
        if is_whole and config.placements.params is Placement.SHARDED:
            raise ConfigError(
                f"prepare(): expected no {dynamo.backend} of a whole model at stage 3; pass "
                "TorchDynamoPlugin(..., use_regional_compilation=True), or compile() its blocks"
            )
        dtype = _DTYPES.get(self.mixed_precision)
        # In DeepSpeed, a mixed precision is the dtype of the parameters.
        if dtype is not None and self._plugin is not None:
            # Without an optimizer there are no masters, so an evaluated model keeps its dtype.
            kept = (config.precision or Precision(params=dtype)) if is_trained else None
            config = attrs.evolve(config, precision=kept)
        return config

    def no_sync(self, model: nn.Module) -> Any:
        """Accumulate without reducing. Local; `accumulate` enters it.

        Without effect at stages 2 and 3, as with DeepSpeed: gradients are sharded as soon as they
        exist. `zero_engine.no_sync(model)` accumulates full gradients at these stages, too.
        """
        found = self._find(model)
        if found is None or found.placements.grads is Placement.SHARDED:
            return nullcontext()
        return zero_engine.no_sync(found.model)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip by the norm over all ranks, and return it. Collective.

        Raises:
            zero_partition.StateError: `parameters` are not all those of one sharded model.
        """
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for found in self._sharded():
            params = set(found.model.parameters())
            if {param for param in params if param.requires_grad} <= set(listed) <= params:
                self.unscale_gradients()
                return zero_engine.clip_grad_norm_(found.model, max_norm, norm_type)
        # For sharded gradients this raises an error.
        return super().clip_grad_norm_(listed, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole model on rank 0, in host memory, and {} on the others. Collective."""
        found = self._find(model)
        if found is None:
            return super().get_state_dict(model, unwrap)
        return zero_engine.full_state_dict(found.model)

    def save_state(self, *args: Any, **kwargs: Any) -> Path:
        """Save as Accelerate does, and sharded models by `zero_engine.save`. Collective.

        The first sharded model is in the folder `zero` there, further ones in `zero_1` and so on.
        `load_state` loads them with another number of ranks, stage or offloading, too.
        """
        with self._sharded_aside():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Go on where `save_state` was called. Collective; raises as `zero_engine.load`."""
        with self._sharded_aside():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _sharded_aside(self) -> Iterator[None]:
        """Hide from Accelerate inside what is sharded; our hooks, run first, save or load it."""
        models, optimizers = self._models, self._optimizers
        self._aside = self._sharded()
        own = {each for found in self._aside for each in _optimizers_of(found)}
        self._models = [model for model in models if self._find(model) is None]
        self._optimizers = [each for each in optimizers if each.optimizer not in own]
        try:
            yield
        finally:
            self._models, self._optimizers, self._aside = models, optimizers, []
        self.wait_for_everyone()

    def _save_sharded(self, models: list[nn.Module], _: list[Any], folder: str) -> None:
        for number, found in enumerate(self._aside):
            into = Path(folder, f"zero_{number}" if number else "zero")
            zero_engine.save(into, found.model, found.optimizer, step=self.step, keep=1)
            # Hooks after this one find the model; its weights are saved already.
            models.append(found.model)

    def _load_sharded(self, _: list[nn.Module], folder: str) -> None:
        for number, found in enumerate(self._aside):
            source = Path(folder, f"zero_{number}" if number else "zero")
            # Accelerate reads `step` only on ranks that were there when it was saved.
            report: Any = zero_engine.load(source, found.model, found.optimizer)
            self.step = report.step

    def _find(self, model: nn.Module) -> ShardedModel | None:
        return find_sharded(self.unwrap_model(model, keep_torch_compile=False))

    def _sharded(self) -> list[ShardedModel]:
        return [found for model in self._models if (found := self._find(model)) is not None]


def _check_axes(kwargs: dict[str, Any]) -> None:
    """Raise ConfigError where axes of ranks are asked for that are not taken."""
    if parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        # The launcher's environment variables set its fields.
        kwargs.setdefault("parallelism_config", ParallelismConfig())
    axes = kwargs.get("parallelism_config")
    for name in ("cp_size", "sp_size") if axes is not None else ():
        if getattr(axes, name, 1) > 1:
            raise ConfigError(
                f"ZeroAccelerator: expected no {name} in parallelism_config, got "
                f"{getattr(axes, name)}: Accelerate has it for FSDP2 and DeepSpeed alone. Leave it "
                "out; docs/guides/composition.md has a loop of ranks that share a sequence"
            )


def _take_plugin(kwargs: dict[str, Any], zero: ZeroConfig | None) -> DeepSpeedPlugin | None:
    """Take the DeepSpeedPlugin of arguments or launcher; None without one.

    Where only the plugin names a dtype, `mixed_precision` of `kwargs` becomes that dtype.

    Raises:
        ConfigError: There are several plugins, or one beside `zero`.
    """
    given = kwargs.pop("deepspeed_plugin", None) or kwargs.pop("deepspeed_plugins", None)
    if given is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        given = DeepSpeedPlugin()
    # With it, Accelerate would import DeepSpeed.
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    plugins = list(given.values()) if isinstance(given, dict) else [given] if given else []
    if len(plugins) > 1 or not isinstance(zero, type(None) if plugins else ZeroConfig | None):
        raise ConfigError(
            f"ZeroAccelerator: expected zero=ZeroConfig(...) or one DeepSpeedPlugin, got {zero!r} "
            f"and {len(plugins)} plugins; leave one out; a file is read by "
            "ZeroConfig.from_deepspeed(file)"
        )
    dtype = kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    for plugin in plugins:
        plugin.set_mixed_precision(dtype)
        said = [name for name in _DTYPES if plugin.deepspeed_config[name].get("enabled") is True]
        if said and dtype == "no":
            kwargs["mixed_precision"] = said[0]
    return plugins[0] if plugins else None


def _optimizers_of(found: ShardedModel) -> tuple[Any, ...]:
    """Return what a script may have prepared with the model: its optimizer, or each of several."""
    return found.optimizer, *getattr(found.optimizer, "optimizers", ())


def _updates(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    updated = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return not set(model.parameters()).isdisjoint(updated)
