"""Accelerate's loop with ZeRO: `Accelerator(...)` becomes `ZeroAccelerator(zero=..., ...)`.

Of Accelerate's own names it uses the attributes `_models` and `_optimizers`, what is prepared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    parse_choice_from_env,
    parse_flag_from_env,
)
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn
from zero_partition import Placement, ShardedModel, StateError, find_sharded

import zero_engine
from zero_engine import ConfigError, FileError, Precision, ZeroConfig

_NO_HOOK: Final = DDPCommunicationHookType.NO
_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Arguments for what distributes a model in another way; ACCELERATE_USE_... says them, too.
_OTHERS: Final = ("fsdp_plugin", "megatron_lm_plugin", "parallelism_config", "torch_tp_plugin")


class ZeroAccelerator(Accelerator):
    """An `accelerate.Accelerator` whose `prepare` shards models and optimizers in place.

    What `prepare` returns for a model is the very module that was given, without a wrapper. With
    `mixed_precision` "bf16" or "fp16" parameters that have an optimizer are kept in it, with
    sharded fp32 masters, and the forward runs under Accelerate's autocast; there is autocast alone
    with `ZeroConfig(precision=Precision())`. On a machine without an accelerator it sets
    `cpu=True`, so that torchrun's ranks meet.

    Collective, beside what is so in Accelerate: `prepare`, `clip_grad_norm_`, `get_state_dict`,
    `save_model`, `save_state` and `load_state`.

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
                    "it distributes the model in its own way; leave it out here and in the "
                    "launcher's configuration"
                )
        if not isinstance(zero, ZeroConfig | None):
            raise ConfigError(
                f"ZeroAccelerator: expected zero to be a ZeroConfig, got {zero!r}; a file is read "
                "by ZeroConfig.from_deepspeed(file)"
            )
        for handler in kwargs.get("kwargs_handlers") or ():
            if (hook := getattr(handler, "comm_hook", _NO_HOOK)) != _NO_HOOK:
                raise ConfigError(
                    f"ZeroAccelerator: expected no comm_hook of DistributedDataParallel, got "
                    f"{hook}; say how gradients travel by ZeroConfig(wire=...)"
                )
        self._plugin = _take_plugin(kwargs, zero)
        self._zero = zero or ZeroConfig()
        self._aside: list[ShardedModel] = []  # while save_state() or load_state() runs
        if not torch.accelerator.is_available():
            kwargs["cpu"] = True
        super().__init__(**kwargs)
        launched, dtype = os.environ.get("WORLD_SIZE", "1"), self.mixed_precision
        if int(launched) > self.num_processes:
            raise ConfigError(
                f"ZeroAccelerator: expected WORLD_SIZE={launched} processes, got "
                f"{self.num_processes}; a PartialState made before it on CPUs needs cpu=True, or "
                "set ACCELERATE_USE_CPU=true"
            )
        if dtype == "fp8" or (dtype == "fp16" and self.scaler is None):
            raise ConfigError(
                f"ZeroAccelerator: expected mixed_precision 'no' or 'bf16', or 'fp16' on a GPU, "
                f"got {dtype!r} on {self.device}, where Accelerate has no loss scale; say 'bf16'"
            )
        clipping = self._plugin and self._plugin.deepspeed_config.get("gradient_clipping")
        self._max_norm = clipping if isinstance(clipping, int | float) else 0.0
        if self._max_norm and self.scaler is not None:
            raise ConfigError(
                f"ZeroAccelerator: expected no gradient_clipping with fp16, got {clipping} in the "
                "DeepSpeedPlugin; call accelerator.clip_grad_norm_() in the loop"
            )
        if self.project_configuration.save_on_each_node:
            raise ConfigError(
                "ZeroAccelerator: expected save_on_each_node=False, as all ranks write into one "
                "folder; name one that all nodes see"
            )
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's, in any order; a model best together with its optimizer. Collective.

        Where a model's optimizer comes in a later call, the model is whole on every rank meanwhile.

        Raises:
            ConfigError: A model has several optimizers, is quantized or spread by `device_map`, or
                would be compiled as a whole at stage 3; or an optimizer stands for DeepSpeed's.
            zero_partition.PartitionError: A model or optimizer cannot be sharded as it is, or was
                sharded or wrapped before.
        """
        for each in args:
            if isinstance(each, DummyOptim | DummyScheduler):
                raise ConfigError(
                    f"prepare(): expected an optimizer or scheduler, got a {type(each).__name__}, "
                    "which stands for one in DeepSpeed's file; make torch's in the script"
                )
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        ready = [
            self.prepare_model(each, place, optimizers=optimizers)
            if isinstance(each, nn.Module)
            else each
            for each, place in zip(args, device_placement or [None] * len(args), strict=True)
        ]
        return super().prepare(*ready, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> nn.Module:
        """Shard a model with its optimizer, as `prepare` does, but in `evaluation_mode`."""
        is_ours = model in self._models or self._find(model) is not None
        if evaluation_mode or (is_ours and hasattr(model, "_is_accelerate_prepared")):
            return super().prepare_model(model, device_placement, evaluation_mode)
        optimizer = _optimizer_of(model, [*optimizers, *self._optimizers])
        config = self._config_of(model, optimizer)
        tensors = chain(model.parameters(), model.buffers())
        places = self.device_placement if device_placement is None else device_placement
        device = torch.empty(0, device=self.device).device  # as tensors have it: cpu:0 is cpu
        if places and any(tensor.device != device for tensor in tensors):
            model.to(self.device)
            if optimizer is not None and optimizer.state:  # it goes where the parameters are
                optimizer.load_state_dict(optimizer.state_dict())
        self._shard(model, optimizer, config)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Wrap an optimizer; shard it, too, if its model was prepared before it. Collective."""
        plain = _unwrap(optimizer)
        for model in [found.model for found in self._sharded() if found.optimizer is None]:
            if _optimizer_of(model, [plain]) is plain:
                zero_engine.unshard(model)
                marks = ("_is_accelerate_prepared", "_original_forward")  # shard() refuses them
                own = {name: vars(model).pop(name) for name in marks if name in vars(model)}
                self._shard(model, plain, self._config_of(model, plain))
                vars(model).update(own)
        if any(found.optimizer is plain for found in self._sharded()):
            device_placement = False  # which would ask for a rank's state_dict()
        return super().prepare_optimizer(optimizer, device_placement)

    def _shard(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig
    ) -> None:
        zero_engine.shard(model, optimizer, config)

        def clip(*_: Any) -> None:
            zero_engine.clip_grad_norm_(model, self._max_norm)

        if optimizer is not None and self._max_norm:  # as DeepSpeed does where its file says so
            optimizer.register_step_pre_hook(clip)

    def _config_of(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ZeroConfig:
        """What holds for this model. Local."""
        if getattr(model, "is_quantized", False) or self.verify_device_map(model):
            raise ConfigError(
                f"prepare(): expected a model in plain dtypes on one device, got a "
                f"{type(model).__name__} that is quantized or spread; load it without "
                "quantization_config and device_map"
            )
        config = self._zero
        if self._plugin is not None:
            config = ZeroConfig.from_deepspeed(self._plugin.deepspeed_config, model=model)
            if names := self._plugin.transformer_moe_cls_names:
                zero_engine.set_leaf_modules(model, names.split(","))
        dynamo: Any = self.state.dynamo_plugin
        is_whole = dynamo.backend.value != "NO" and not dynamo.use_regional_compilation
        if is_whole and config.placements.params is Placement.SHARDED:
            raise ConfigError(
                f"prepare(): expected no {dynamo.backend} of a whole model at stage 3; pass "
                "TorchDynamoPlugin(..., use_regional_compilation=True), or compile() its blocks"
            )
        dtype = _DTYPES.get(self.mixed_precision)
        if self._zero.precision is not None or dtype is None:
            return config
        # Without an optimizer there are no masters: what is to train later would be rounded.
        kept = None if optimizer is None else config.precision or Precision(params=dtype)
        return attrs.evolve(config, precision=kept)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate without reducing. Local; `accumulate` enters it.

        Without effect at stages 2 and 3, as with DeepSpeed: gradients are sharded as soon as they
        exist. `zero_engine.no_sync(model)` keeps whole ones there, too.
        """
        found = self._find(model)
        if found is None or found.placements.grads is Placement.SHARDED:
            yield
            return
        with zero_engine.no_sync(found.model):
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip by the norm over all ranks, and return it. Collective.

        Raises:
            zero_partition.StateError: `parameters` are not all those of one sharded model.
        """
        model, given = self._model_of(parameters, "clip_grad_norm_()")
        if model is None:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        self.unscale_gradients()
        return zero_engine.clip_grad_norm_(model, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp every element of gradients; it raises as `clip_grad_norm_` does."""
        model, given = self._model_of(parameters, "clip_grad_value_()")
        if model is None:
            return super().clip_grad_value_(given, clip_value)
        self.unscale_gradients()
        return zero_engine.clip_grad_value_(model, clip_value)

    def _model_of(
        self, parameters: Tensor | Iterable[Tensor], what: str
    ) -> tuple[nn.Module | None, list[Tensor]]:
        """The sharded model whose parameters these are, if they are of one."""
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = {id(param) for param in listed}
        models = [found.model for found in self._sharded()]
        models = [m for m in models if any(id(param) in given for param in m.parameters())]
        trained = {id(p) for m in models for p in m.parameters() if p.requires_grad}
        if len(models) > 1 or not trained <= given:
            raise StateError(
                f"{what}: expected the parameters of one prepared model, all of them, got "
                f"{len(trained & given)} of {len(trained)} that train in {len(models)} models "
                f"(rank {self.process_index}); pass model.parameters(), model by model"
            )
        return models[0] if models else None, listed

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole model on rank 0, in host memory, and {} on the others. Collective."""
        found = self._find(model)
        if found is None:
            return super().get_state_dict(model, unwrap)
        return zero_engine.full_state_dict(found.model)

    def save_state(self, *args: Any, **kwargs: Any) -> Path:
        """As Accelerate's; what is sharded is in `zero` there, by `zero_engine.save`. Collective.

        `load_state` takes it at another number of ranks, stage or residence, too.
        """
        with self._sharded_aside():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Go on where `save_state` was called. Collective; raises as `zero_engine.load`."""
        with self._sharded_aside():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _sharded_aside(self) -> Iterator[None]:
        """Accelerate saves or loads what is not sharded, and our hooks, its first, the rest."""
        models, optimizers = self._models, self._optimizers
        self._aside = self._sharded()
        own = [id(found.optimizer) for found in self._aside]
        self._models = [model for model in models if self._find(model) is None]
        self._optimizers = [each for each in optimizers if id(_unwrap(each)) not in own]
        try:
            yield
        finally:
            self._models, self._optimizers, self._aside = models, optimizers, []
        self.wait_for_everyone()

    def _save_sharded(self, models: list[nn.Module], _: list[Any], folder: str) -> None:
        for number, found in enumerate(self._aside):
            into = Path(folder, f"zero_{number}" if number else "zero")
            zero_engine.save(into, found.model, found.optimizer, step=self.step, keep=1)
            models.append(found.model)  # for hooks after this one, without weights of its own

    def _load_sharded(self, _: list[nn.Module], folder: str) -> None:
        for number, found in enumerate(self._aside):
            source = Path(folder, f"zero_{number}" if number else "zero")
            if not source.is_dir():
                raise FileError(
                    f"load_state(): expected {source}, which ZeroAccelerator.save_state() writes, "
                    "got no such folder; weights of another are read by "
                    "zero_engine.load_pretrained(model, folder)"
                )
            # Accelerate reads `step` only on ranks that were there when it was saved.
            report = zero_engine.load(source, found.model, found.optimizer)
            assert report is not None, "load() raises where there is nothing"
            self.step = report.step

    def _find(self, model: nn.Module) -> ShardedModel | None:
        return find_sharded(self.unwrap_model(model, keep_torch_compile=False))

    def _sharded(self) -> list[ShardedModel]:
        """Those of the prepared models."""
        return [found for model in self._models if (found := self._find(model)) is not None]


def _take_plugin(kwargs: dict[str, Any], zero: ZeroConfig | None) -> DeepSpeedPlugin | None:
    """What is said for DeepSpeed, by argument or launcher; its dtype and accumulation go on."""
    given = kwargs.pop("deepspeed_plugin", None) or kwargs.pop("deepspeed_plugins", None)
    if given is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        given = DeepSpeedPlugin()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # Accelerate would import the package
    if given is None:
        return None
    plugin, *more = given.values() if isinstance(given, dict) else [given]
    if more or zero is not None:
        raise ConfigError(
            f"ZeroAccelerator: expected one DeepSpeedPlugin or zero=ZeroConfig(...), got "
            f"{1 + len(more)} plugins and zero={zero!r}; leave one out"
        )
    launched = parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
    plugin.set_mixed_precision(kwargs.get("mixed_precision") or launched)
    config = plugin.deepspeed_config
    kwargs["mixed_precision"] = next((d for d in _DTYPES if config[d].get("enabled") is True), "no")
    steps = config.get("gradient_accumulation_steps")
    if isinstance(steps, int) and steps > 1:  # Accelerate writes 1 for none
        own = kwargs.setdefault("gradient_accumulation_steps", steps)
        if own != steps:
            raise ConfigError(
                f"ZeroAccelerator: expected gradient_accumulation_steps={steps}, as in the "
                f"DeepSpeedPlugin, got {own}; leave one out"
            )
    return plugin


def _optimizer_of(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> torch.optim.Optimizer | None:
    """The one that has parameters of this model, plain."""
    own = {id(param) for param in model.parameters()}
    found = {
        id(plain): plain
        for plain in map(_unwrap, optimizers)
        if any(id(param) in own for group in plain.param_groups for param in group["params"])
    }
    if len(found) > 1:
        raise ConfigError(
            f"prepare(): expected one optimizer for a {type(model).__name__}, got {len(found)}; "
            "chain them: zero_engine.ChainedOptimizer(muon, adamw)"
        )
    return next(iter(found.values()), None)


def _unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
