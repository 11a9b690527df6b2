"""Accelerate's loop with ZeRO: `Accelerator(...)` becomes `ZeroAccelerator(zero=..., ...)`."""

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
from accelerate.utils import DeepSpeedPlugin, parse_choice_from_env, parse_flag_from_env
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn
from zero_partition import Placement, ShardedModel, StateError, find_sharded

import zero_engine
from zero_engine import ConfigError, Precision, ZeroConfig

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OTHERS: Final = {  # what distributes a model in another way: argument, and what a launcher sets
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "torch_tp_plugin": "",
}


class ZeroAccelerator(Accelerator):
    """An `accelerate.Accelerator` whose `prepare` shards models and optimizers in place.

    A prepared model is the very module that was given, not a wrapper, and a prepared optimizer
    wraps the very optimizer. Where several processes are on machines without an accelerator, as
    torchrun starts them, `cpu=True` is set. With `mixed_precision` of "bf16" or "fp16" parameters
    are kept in it, with sharded fp32 masters, and forwards run under Accelerate's autocast;
    `ZeroConfig(precision=...)` chooses otherwise, `Precision()` for autocast alone.

    Collective, beside what is so in Accelerate: `prepare`, `clip_grad_norm_`, `get_state_dict`,
    `save_model`, `save_state`, `load_state`.

    Args:
        zero: How to distribute. `ZeroConfig()`, stage 3, when None, or what a `DeepSpeedPlugin`
            says, given as `deepspeed_plugin` or by `accelerate launch --use_deepspeed`.
        **kwargs: As for `Accelerator`.

    Raises:
        ConfigError: Arguments or the environment ask for what cannot be beside it; the message says
            what to do.
    """

    def __init__(self, *, zero: ZeroConfig | None = None, **kwargs: Any) -> None:
        if not isinstance(zero, ZeroConfig | None):
            raise ConfigError(
                f"ZeroAccelerator: expected zero to be a ZeroConfig, got {zero!r}; "
                "ZeroConfig.from_deepspeed(file) reads DeepSpeed's files"
            )
        for name, variable in _OTHERS.items():
            if kwargs.get(name) is not None or (variable and parse_flag_from_env(variable)):
                raise ConfigError(
                    f"ZeroAccelerator: expected no {name}, which distributes the model in its own "
                    f"way; leave it out, here and in `accelerate config` ({variable or 'no flag'}),"
                    " and say zero=ZeroConfig(stage=3)"
                )
        for handler in kwargs.get("kwargs_handlers") or ():
            if getattr(handler, "comm_hook", "no") != "no":
                raise ConfigError(
                    f"ZeroAccelerator: expected no comm_hook, got {handler.comm_hook}, which is "
                    "DistributedDataParallel's; say how gradients travel by ZeroConfig(wire=...) "
                    "or Precision(reduce=...)"
                )
        self._plugin = _take_plugin(kwargs, zero)
        self._zero = zero or ZeroConfig()
        self._aside: list[ShardedModel] = []  # while save_state() or load_state() runs
        self._strict, self._has_frozen = True, True  # what that was asked
        self._saved_step: int | None = None
        if not torch.accelerator.is_available():
            kwargs["cpu"] = True
        super().__init__(**kwargs)
        self._check_environment()
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    def _check_environment(self) -> None:
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > self.num_processes:
            raise ConfigError(
                f"ZeroAccelerator: expected as many processes as WORLD_SIZE={launched} says, got "
                f"{self.num_processes}; where a PartialState or Accelerator is made before, on "
                "CPUs, give that cpu=True, or set ACCELERATE_USE_CPU=true"
            )
        if self.mixed_precision == "fp8" or (self.mixed_precision == "fp16" and not self.scaler):
            raise ConfigError(
                f"ZeroAccelerator: expected mixed_precision 'no' or 'bf16', or 'fp16' on a GPU, "
                f"got {self.mixed_precision!r} on {self.device}: Accelerate would drop the loss "
                "scale of fp16 on a CPU, and fp8 replaces layers; say mixed_precision='bf16'"
            )
        clipping = self._plugin and self._plugin.deepspeed_config.get("gradient_clipping")
        self._max_norm = clipping if isinstance(clipping, int | float) else 0.0
        if self._max_norm and self.scaler is not None:
            raise ConfigError(
                f"ZeroAccelerator: expected no gradient_clipping in the DeepSpeedPlugin with fp16, "
                f"got {clipping}; leave it out, and call accelerator.clip_grad_norm_() in the loop"
            )
        if self.project_configuration.save_on_each_node:
            raise ConfigError(
                "ZeroAccelerator: expected save_on_each_node=False, as every rank writes its part "
                "of a checkpoint into one folder; save where all nodes see it"
            )

    # ---- Preparing ----

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's, in any order; a model and its optimizer in one call. Collective.

        Where the optimizer of a prepared model comes later, the model is whole on every rank for a
        moment.

        Raises:
            ConfigError: A model has several optimizers, is quantized or dispatched by `device_map`,
                or the optimizer or scheduler is a placeholder for DeepSpeed's.
            zero_partition.PartitionError: A model or optimizer cannot be sharded as it is, or is
                sharded or wrapped already.
        """
        for thing in args:
            if isinstance(thing, DummyOptim | DummyScheduler):
                raise ConfigError(
                    f"prepare(): expected an optimizer or scheduler, got a {type(thing).__name__}, "
                    "which stands for one in a DeepSpeed file; build torch's here instead"
                )
        optimizers = [thing for thing in args if isinstance(thing, torch.optim.Optimizer)]
        placements = device_placement or [None] * len(args)
        prepared = [
            self.prepare_model(thing, placement, optimizers=optimizers)
            if isinstance(thing, nn.Module)
            else thing
            for thing, placement in zip(args, placements, strict=True)
        ]
        return super().prepare(*prepared, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> nn.Module:
        """Shard a model, with that of the optimizers that has its parameters. Collective.

        With `evaluation_mode` it is not sharded, as Accelerate does not wrap it then. `prepare`
        says more.
        """
        if evaluation_mode or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        config = self._config_of(model)
        optimizer = _optimizer_of(model, [*optimizers, *self._optimizers])
        if device_placement or (device_placement is None and self.device_placement):
            tensors = chain(model.parameters(), model.buffers())
            if any(tensor.device != self.device for tensor in tensors):
                model.to(self.device)
                if optimizer is not None and optimizer.state:  # which goes where parameters are
                    optimizer.load_state_dict(optimizer.state_dict())
        zero_engine.shard(model, optimizer, config)
        self._clip_in_step(model, optimizer)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer, and shard it with a model that was prepared before it. Collective."""
        plain = _unwrap(optimizer)
        for sharded in self._sharded():
            model = sharded.model
            if sharded.optimizer is None and _optimizer_of(model, [plain]) is plain:
                zero_engine.unshard(model)
                marks = ("_is_accelerate_prepared", "_original_forward")  # which shard() refuses
                own = {name: vars(model).pop(name) for name in marks if name in vars(model)}
                zero_engine.shard(model, plain, self._config_of(model))
                vars(model).update(own)
                self._clip_in_step(model, plain)
        if any(sharded.optimizer is plain for sharded in self._sharded()):
            device_placement = False  # which asks for a state_dict()
        return super().prepare_optimizer(optimizer, device_placement)

    def _config_of(self, model: nn.Module) -> ZeroConfig:
        """What holds for this model, or what is in the way. Local."""
        if getattr(model, "is_quantized", False) or self.verify_device_map(model):
            raise ConfigError(
                f"prepare(): expected a model in plain dtypes, whole on one device, got a "
                f"{type(model).__name__} that is quantized or dispatched over devices; load it "
                "without quantization_config, load_in_8bit, load_in_4bit and device_map"
            )
        config = self._zero
        if self._plugin is not None:
            config = ZeroConfig.from_deepspeed(self._plugin.deepspeed_config, model=model)
            if names := self._plugin.transformer_moe_cls_names:
                zero_engine.set_leaf_modules(model, names.split(","))
        dynamo = self.state.dynamo_plugin
        is_whole = dynamo.backend.value != "NO" and not dynamo.use_regional_compilation
        if is_whole and config.placements.params is Placement.SHARDED:
            raise ConfigError(
                "prepare(): expected no compilation of the whole model at stage 3, got "
                f"dynamo_backend {dynamo.backend.value}; say dynamo_plugin=TorchDynamoPlugin(..., "
                "use_regional_compilation=True), or call block.compile() on each block"
            )
        dtype = _DTYPES.get(self.mixed_precision)
        if config.precision is None and dtype is not None:
            return attrs.evolve(config, precision=Precision(params=dtype))
        params = None if config.precision is None else config.precision.params
        if dtype is not None and params not in (None, dtype):
            raise ConfigError(
                f"prepare(): expected ZeroConfig.precision.params to be {dtype} or None with "
                f"mixed_precision={self.mixed_precision!r}, got {params}; leave one of them out"
            )
        return config

    def _clip_in_step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """What DeepSpeed does where its file says so."""
        if optimizer is not None and (max_norm := self._max_norm):

            def clip(*_: Any) -> None:
                zero_engine.clip_grad_norm_(model, max_norm)

            optimizer.register_step_pre_hook(clip)

    # ---- In the loop ----

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate without reducing, as `accumulate` does; at stages 2 and 3 nothing, as there
        gradients are sharded as soon as they exist. `zero_engine.no_sync` is for any stage.
        """
        sharded = self._find(model)
        if sharded is None or sharded.placements.grads is Placement.SHARDED:
            yield
            return
        with zero_engine.no_sync(sharded.model):
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip by the norm over all ranks, which is returned: `zero_engine.clip_grad_norm_`.

        Raises:
            zero_partition.StateError: `parameters` are not all those of one sharded model.
        """
        parameters = _as_list(parameters)
        model = self._model_of(parameters, "clip_grad_norm_()")
        if model is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return zero_engine.clip_grad_norm_(model, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp gradients: `zero_engine.clip_grad_value_`. It raises as `clip_grad_norm_` does."""
        parameters = _as_list(parameters)
        model = self._model_of(parameters, "clip_grad_value_()")
        if model is None:
            return super().clip_grad_value_(parameters, clip_value)
        self.unscale_gradients()
        return zero_engine.clip_grad_value_(model, clip_value)

    def _model_of(self, parameters: list[Tensor], what: str) -> nn.Module | None:
        """The sharded model whose parameters these are; None if they are of none."""
        given = {id(p) for p in parameters}
        models = [sharded.model for sharded in self._sharded()]
        found = [m for m in models if any(id(p) in given for p in m.parameters())]
        trained = {id(p) for m in found for p in m.parameters() if p.requires_grad}
        if found and (len(found) > 1 or not trained <= given):
            raise StateError(
                f"{what}: expected the parameters of one prepared model, all of them, got "
                f"{len(given)} of {len(found)} models that train {len(trained)} (rank "
                f"{self.process_index}); pass model.parameters(), one model after the other"
            )
        return found[0] if found else None

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refused: only DistributedDataParallel has it.

        Raises:
            zero_partition.StateError: Always; it says what to do.
        """
        raise StateError(
            "join_uneven_inputs(): expected as many batches on every rank; keep even_batches=True, "
            "or call zero_engine.backward_without_batch(model) on ranks that have none left"
        )

    # ---- Saving and loading ----

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole model, on rank 0 in host memory, and {} on the others. Collective."""
        sharded = self._find(model)
        if sharded is None:
            return super().get_state_dict(model, unwrap)
        return zero_engine.full_state_dict(sharded.model)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's; it returns when the files are there. Collective."""
        super().save_model(*args, **kwargs)
        self.wait_for_everyone()

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        *,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """As Accelerate's, with what is sharded in the folder's `zero`, by `zero_engine.save`.

        Collective. `load_state` takes it at any number of ranks, stage and residence.

        Args:
            output_dir: As in Accelerate.
            safe_serialization: Of models that are not sharded.
            exclude_frozen_parameters: Leave them out, as DeepSpeed's argument of this name does.
        """
        self._has_frozen = not exclude_frozen_parameters
        with self._sharded_aside():
            path = super().save_state(output_dir, safe_serialization)
        self.wait_for_everyone()
        return path

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        map_location: str | None = None,
    ) -> None:
        """Go on where `save_state` was called. Collective.

        Args:
            input_dir: As in Accelerate.
            load_kwargs: As in Accelerate, for files of its own.
            strict: Whether it is an error if names of what is sharded are missing or unexpected.
            map_location: As in Accelerate, for optimizers that are not sharded.
        """
        self._strict = strict
        with self._sharded_aside():
            super().load_state(input_dir, load_kwargs, map_location=map_location)

    @contextmanager
    def _sharded_aside(self) -> Iterator[None]:
        """What Accelerate saves or loads inside is what is not sharded; our hooks do the rest."""
        models, optimizers = self._models, self._optimizers
        self._aside = self._sharded()
        own = [id(sharded.optimizer) for sharded in self._aside]
        self._models = [model for model in models if self._find(model) is None]
        self._optimizers = [one for one in optimizers if id(_unwrap(one)) not in own]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
        if self._saved_step is not None:  # the same on ranks that were not there when it was saved
            self.step, self._saved_step = self._saved_step, None

    def _save_sharded(self, models: list[nn.Module], _: list[Any], folder: str) -> None:
        for number, sharded in enumerate(self._aside):
            zero_engine.save(
                _folder(folder, number),
                sharded.model,
                sharded.optimizer,
                step=self.step,
                keep=1,
                exclude_frozen=not self._has_frozen,
            )
            models.append(sharded.model)  # for hooks after this one; without weights of its own

    def _load_sharded(self, _: list[nn.Module], folder: str) -> None:
        for number, sharded in enumerate(self._aside):
            where = _folder(folder, number)
            report = zero_engine.load(
                where, sharded.model, sharded.optimizer, is_strict=self._strict
            )
            self._saved_step = report.step

    def _find(self, model: nn.Module) -> ShardedModel | None:
        return find_sharded(self.unwrap_model(model, keep_torch_compile=False))

    def _sharded(self) -> list[ShardedModel]:
        """Of the prepared models those that are."""
        return [found for model in self._models if (found := self._find(model)) is not None]


def _take_plugin(kwargs: dict[str, Any], zero: ZeroConfig | None) -> DeepSpeedPlugin | None:
    """What is said for DeepSpeed, by argument or launcher, with its dtype and accumulation."""
    given = [kwargs.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    plugins = [one for one in given if one is not None]
    if not plugins and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        plugins = [DeepSpeedPlugin()]
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # Accelerate would import the package
    if plugins and isinstance(plugins[0], dict):
        plugins = list(plugins[0].values())
    if not plugins:
        return None
    if len(plugins) > 1 or zero is not None:
        raise ConfigError(
            "ZeroAccelerator: expected zero=ZeroConfig(...) or one DeepSpeedPlugin, got "
            f"{len(plugins)} plugins and zero={zero!r}; give one of them"
        )
    plugin = plugins[0]
    plugin.set_mixed_precision(
        kwargs.get("mixed_precision") or parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
    )
    config = plugin.deepspeed_config
    kwargs["mixed_precision"] = next((d for d in _DTYPES if config[d].get("enabled") is True), "no")
    steps = config.get("gradient_accumulation_steps")
    if isinstance(steps, int) and steps > 1:  # 1 is also what Accelerate writes for none
        if kwargs.get("gradient_accumulation_steps", steps) != steps:
            raise ConfigError(
                f"ZeroAccelerator: expected gradient_accumulation_steps={steps}, as the "
                f"DeepSpeedPlugin says, got {kwargs['gradient_accumulation_steps']}; leave one out"
            )
        kwargs["gradient_accumulation_steps"] = steps
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
            "several step as one when they are chained: ChainedOptimizer(muon, adamw)"
        )
    return next(iter(found.values()), None)


def _unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _folder(folder: str, number: int) -> Path:
    return Path(folder, f"zero_{number}" if number else "zero")
