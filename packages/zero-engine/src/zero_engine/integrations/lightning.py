"""Lightning: `Trainer(strategy=ZeroStrategy(stage=3))`, `Fabric(strategy=ZeroFabricStrategy())`.

Both are Lightning's DDPStrategy, but call `zero_engine.shard()` in place of wrapping the model.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from zero_partition import AS_IT_IS
from zero_partition.seams import find_sharded

import zero_engine
from zero_engine import ConfigError, FileError, ZeroConfig
from zero_engine.checkpoint.folder import Checkpoint

_OF_DDP: Final = ("cluster_environment", "parallel_devices", "process_group_backend", "timeout")
_PRECISIONS: Final = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
_AVERAGES: Final = (StochasticWeightAveraging, WeightAveraging)
# Key in a checkpoint's `extra` for the content of Lightning's own file.
_BESIDE: Final = "lightning"


@cache
def _finding_own_zero_grad(kind: type[Optimizer]) -> type[Optimizer]:
    """Return a class with a `zero_grad` that calls the one that `shard()` set on the optimizer.

    Lightning's wrapper of an optimizer inherits from the optimizer's class, so that it does not
    find a method that is set on the instance.
    """

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        optimizer = vars(self).get("_optimizer", self)
        vars(optimizer).get("zero_grad", partial(kind.zero_grad, optimizer))(set_to_none)

    return type(kind.__name__, (kind,), {"zero_grad": zero_grad})


class _Called(nn.Module):
    """Wrapper used in place of DistributedDataParallel; it calls every step through forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.forward = module, module.__call__
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict


class _Zero:
    """Methods of both strategies, which also inherit from a strategy of Lightning's."""

    # Has the axes "data_parallel" and "tensor_parallel"; None without tensor parallelism.
    device_mesh: Any = None

    def __init__(
        self,
        stage: int = 3,
        *,
        config: ZeroConfig | None = None,
        tensor_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        of_ddp = {key: options.pop(key) for key in _OF_DDP if key in options}
        if config is not None and (options or stage != 3 or not isinstance(config, ZeroConfig)):
            raise ConfigError(
                f"ZeroStrategy: expected config to be a ZeroConfig, alone, got {config!r} and "
                f"{options or stage}; DeepSpeed's file is read by ZeroConfig.from_deepspeed(path)"
            )
        self.config = config or ZeroConfig(stage, **options)
        self._tensor_parallel_size = tensor_parallel_size
        super().__init__(**of_ddp)

    def setup_environment(self: Any) -> None:
        """Start the process group, and name axes of ranks if there are several. Collective."""
        super().setup_environment()  # type: ignore[missing-attribute]
        size, number = self._tensor_parallel_size, self.world_size
        if not isinstance(size, int) or size < 1 or number % size:
            raise ConfigError(
                f"ZeroStrategy: expected tensor_parallel_size to be a divisor of the {number} "
                f"ranks, got {size!r}"
            )
        if size > 1:
            self.device_mesh = init_device_mesh(
                self.root_device.type,
                (number // size, size),
                mesh_dim_names=("data_parallel", "tensor_parallel"),
            )

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        """Number of ranks that get batches of their own, and which of them this is."""
        if self.device_mesh is None:
            return super().distributed_sampler_kwargs  # type: ignore[missing-attribute]
        of_data = self.device_mesh["data_parallel"]
        return {"num_replicas": of_data.size(), "rank": of_data.get_local_rank()}

    def _shard(self, module: nn.Module, optimizers: Sequence[Optimizer], plugin: Any) -> None:
        name, own = type(plugin).__name__, self.config.precision
        if name not in _PRECISIONS or (own is not None and name != "Precision"):
            raise ConfigError(
                "ZeroStrategy: expected one precision, Lightning's by '16-mixed' and the like, or "
                f"ZeroConfig's with '32-true'; got the plugin {name} and {own}"
            )
        # If `configure_optimizers()` returns None, Lightning makes an optimizer without groups.
        real = [optimizer for optimizer in optimizers if optimizer.param_groups]
        given: Any = real[0] if len(real) == 1 else real or None
        over = None if self.device_mesh is None else self.device_mesh["data_parallel"]
        config = self.config
        if name != "Precision":
            # Lightning's "bf16-true" says that there are no masters: no warning.
            config = evolve(config, precision=AS_IT_IS)
        zero_engine.shard(module, given, config, group=over)
        sharded: Any = find_sharded(module)
        for optimizer in real:
            restore = partial(setattr, optimizer, "__class__", type(optimizer))
            optimizer.__class__ = _finding_own_zero_grad(type(optimizer))
            sharded.removers.append(restore)

    def _save(
        self: Any, path: Any, model: Any, optimizer: Any, beside: Any, step: int = 0, **options: Any
    ) -> None:
        path, writer = self.broadcast(path), type(self.checkpoint_io)
        if "://" in str(path) or any(options.values()) or writer is not TorchCheckpointIO:
            raise ConfigError(
                f"ZeroStrategy: expected no {', '.join(options)}, no CheckpointIO plugin, and a "
                f"path that every rank sees, got {options}, a {writer.__name__} and {path!r}"
            )
        written = io.BytesIO()
        torch.save(beside, written)
        extra = {_BESIDE: torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)}
        folder, tag = _visible(path).parent, _visible(path).name
        zero_engine.save(folder, model, optimizer, tag=tag, step=step, extra=extra, is_latest=False)


class ZeroStrategy(_Zero, DDPStrategy):
    """ZeRO for `lightning.Trainer`: losses and weights are those of DDPStrategy.

    The module and its optimizer stay sharded when `fit` ends, for what follows; a further `fit`, by
    this trainer or another, shards it anew with the optimizer that it configures. Checkpoints are
    folders, as `zero_engine.save` writes them; of weights alone (`save_weights_only`) they are
    files that `Model.load_from_checkpoint` reads. Files that DDPStrategy wrote are loaded, too.

    Args:
        stage: As for `ZeroConfig`.
        config: In place of `stage` and its other fields.
        single_file: Write a checkpoint as one file, as DDPStrategy does, which `torch.load` and
            `Model.load_from_checkpoint` read: rank 0 has all of it in host memory meanwhile.
        tensor_parallel_size: Number of ranks over which the module splits itself, as with
            Lightning's ModelParallelStrategy: by `parallelize_module` in `configure_model`, over
            `self.device_mesh["tensor_parallel"]`. They get the same batches.
        **options: Other fields of `ZeroConfig`, such as `offload`; and DDPStrategy's
            `cluster_environment`, `parallel_devices`, `process_group_backend` and `timeout`.

    Raises:
        ConfigError: An option is wrong or unknown, or `config` comes with others.
    """

    # Set by the trainer before anything else.
    lightning_module: Any
    # Each rank reads its own part, which is known after the setup.
    restore_checkpoint_after_setup = True

    def __init__(self, stage: int = 3, *, single_file: bool = False, **options: Any) -> None:
        super().__init__(stage, **options)
        self._single_file = single_file
        # Folder that the trainer is resuming from, until its tensors are loaded.
        self._resumed: Any = None

    def model_sharded_context(self) -> Any:
        """Return a context that shards what `configure_model` builds, as it is built. Collective.

        With tensor parallelism the module is sharded later, after it has split itself.
        """
        return zero_engine.Init(config=self.config) if self.device_mesh is None else nullcontext()

    def setup_environment(self) -> None:
        """Let the module find the axes of ranks where Lightning has them. Collective."""
        super().setup_environment()
        self.lightning_module._device_mesh = self.device_mesh

    def setup(self, trainer: Any) -> None:
        """Shard the module, with its optimizer when fitting; one sharded stays so. Collective."""
        module, is_fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        accelerator: Any = self.accelerator
        plugin: Any = self.precision_plugin
        accelerator.setup(trainer)
        averages = [c for c in trainer.callbacks if isinstance(c, _AVERAGES)]
        is_compiled = getattr(module, "_compiler_ctx", None) is not None
        if self.config.stage == 3 and (averages or is_compiled):
            raise ConfigError(
                "ZeroStrategy at stage 3: expected no torch.compile() of a whole LightningModule, "
                f"and no callback that copies whole weights, got {averages or 'the first'}; compile"
                " blocks, keep a zero_engine.ShardedAverage(module, decay=...), or use stage 2"
            )
        if is_fitting or find_sharded(module) is None:
            if is_fitting and self._layer_sync is not None:
                self._layer_sync.apply(module)
            plugin.convert_module(module)
            self.model_to_device()
            if is_fitting:
                self.setup_optimizers(trainer)
            self._shard(module, self.optimizers if is_fitting else (), plugin)
        # With manual optimization, training_step() steps the optimizer, so forward must not run it.
        self.model = _Called(module) if module.automatic_optimization else module
        self.setup_precision_plugin()
        # The plugin's own functions would clip by the norm of one rank's shards.
        plugin.clip_grad_by_norm = lambda of, norm: zero_engine.clip_grad_norm_(_plain(of), norm)
        plugin.clip_grad_by_value = lambda of, by: zero_engine.clip_grad_value_(_plain(of), by)
        for callback in trainer.callbacks:
            # It maps parameters of param groups to names and back, which would fail for shards.
            if isinstance(callback, BaseFinetuning):
                callback._apply_mapping_to_param_groups = partial(_named_groups, module)

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward before the step, as in a plain loop.

        Lightning runs them in the step's closure, where accumulated gradients would be reduced
        apart. An optimizer that calls the closure repeatedly runs them there from the second time.
        """
        first = [closure()]
        return super().optimizer_step(
            optimizer, lambda: first.pop() if first else closure(), *args, **kwargs
        )

    def block_backward_sync(self) -> Any:
        """Accumulate unsharded gradients below stage 2; else each backward reduces its own."""
        is_whole = self.config.stage < 2
        return zero_engine.no_sync(self.lightning_module) if is_whole else nullcontext()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return {} if the module is sharded: `save_checkpoint` gets the weights itself."""
        is_sharded = find_sharded(self.lightning_module) is not None
        return {} if is_sharded else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return {}: `save_checkpoint` gets the state itself."""
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Write a folder, or a file if it is of weights only. Collective."""
        # `on_save_checkpoint` may have put entries into "state_dict".
        module, filled = self.lightning_module, checkpoint["state_dict"]
        # Before a fit, the module is not sharded.
        if (sharded := find_sharded(module)) is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._single_file or "optimizer_states" not in checkpoint:
            whole = checkpoint | {"state_dict": zero_engine.full_state_dict(module) | filled}
            if checkpoint.get("optimizer_states") and sharded.optimizer is not None:
                states = zero_engine.full_optimizer_state_dict(module)
                several = len(checkpoint["optimizer_states"]) > 1
                whole["optimizer_states"] = states.get("optimizers", []) if several else [states]
            super().save_checkpoint(whole, filepath, storage_options)
            return
        beside, step = checkpoint | {"optimizer_states": []}, checkpoint["global_step"]
        options = {"storage_options": storage_options, "checkpoint['state_dict']": [*filled]}
        self._save(filepath, module, sharded.optimizer, beside, step, **options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a folder, with the optimizer when fitting; or read a file. Collective."""
        path, module = self.broadcast(checkpoint_path), self.lightning_module
        if not _visible(path).is_dir():
            return super().load_checkpoint(path, weights_only)
        if module.trainer.state.fn != TrainerFn.FITTING:
            extra = _load(path, module, None, module.strict_loading)
            return _kept_beside(extra, path, weights_only)
        self._resumed = path
        return _kept_beside(_open(path).manifest.extra, path, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a folder, or a file."""
        folder = _visible(filepath)
        super().remove_checkpoint(folder if folder.is_dir() else filepath)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a file; do nothing for a folder, loaded by other methods."""
        if checkpoint["state_dict"]:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of a file, or, with callbacks restored, all of a folder. Collective."""
        states, module = checkpoint["optimizer_states"], self.lightning_module
        if self._resumed is not None:
            path, self._resumed = self._resumed, None
            self._thaw(_open(path).frozen)
            optimizer = getattr(find_sharded(module), "optimizer", None)
            _load(path, module, optimizer, module.strict_loading)
        # Optimizers that configure_optimizers() did not return have no state here.
        elif any(states):
            whole = states[0] if len(states) == 1 else {"optimizers": states}
            zero_engine.load_full_optimizer_state_dict(module, whole)

    def _thaw(self, frozen: Collection[str]) -> None:
        """Let callbacks that thaw a model have the param groups of when it was saved. Collective.

        Lightning does it before it restores what they kept, where a strategy restores late. It
        leaves parameters of these groups frozen; here they train as they did.
        """
        module, trainer = self.lightning_module, self.lightning_module.trainer
        thawing = [each for each in trainer.callbacks if isinstance(each, BaseFinetuning)]
        for callback in thawing:
            callback.on_fit_start(trainer, module)
        sharded: Any = find_sharded(module)
        if thawing and sharded.is_outdated():
            for name, param in module.named_parameters():
                param.requires_grad_(name not in frozen)
            sharded.partition_again()

    def teardown(self) -> None:
        """Leave module and optimizer as they are, sharded and on their device."""
        parts: Any = self.cluster_environment, self.accelerator
        for part in (*parts, self.precision_plugin, self.checkpoint_io):
            part.teardown()


class ZeroFabricStrategy(_Zero, FabricDDPStrategy):
    """ZeRO for `lightning.Fabric`, made as a `ZeroStrategy` is.

    With `tensor_parallel_size`, split the model over `fabric.strategy.device_mesh`'s
    "tensor_parallel" ranks before `fabric.setup`.

    `fabric.setup(model, optimizer)` shards both. `fabric.save(path, state)` writes a folder, as
    `zero_engine.save` does, if `state` contains a model that was set up; `fabric.load` reads it.
    """

    def no_backward_sync(self, module: Any, enabled: bool) -> Any:
        """Return the context for `fabric.no_backward_sync`, `zero_engine.no_sync` if enabled."""
        return zero_engine.no_sync(module.module) if enabled else nullcontext()

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Shard models that are built inside, while they are built. Collective."""
        init = zero_engine.Init(config=self.config) if self.device_mesh is None else nullcontext()
        with super().module_init_context(empty_init), init:
            yield

    def setup_module_and_optimizers(  # type: ignore[override]
        self, module: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, Sequence[Optimizer], Any]:
        """Shard a model with its optimizer. Collective."""
        self._shard(module, optimizers, self.precision)
        self._backward_sync_control: Any = self
        return _Called(module), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Shard a model without an optimizer. Collective."""
        return self.setup_module_and_optimizers(module, ())[0]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise ConfigError: an optimizer is sharded together with its model."""
        raise ConfigError(
            "fabric.setup_optimizers(): an optimizer is sharded together with its model; call "
            "model, optimizer = fabric.setup(model, optimizer)"
        )

    def clip_gradients_norm(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Clip gradients by the norm over all ranks, and return it. Collective."""
        self.precision.unscale_gradients(optimizer)
        return zero_engine.clip_grad_norm_(optimizer, *args, **kwargs)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Clamp every element of the gradients."""
        self.precision.unscale_gradients(optimizer)
        zero_engine.clip_grad_value_(optimizer, clip_val)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a folder if `state` contains a model that was set up, else a file. Collective."""
        model, optimizer, others = _set_up_in(state)
        if model is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        beside = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in others.items()}
        self._save(path, model, optimizer, beside, storage_options=storage_options, filter=filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder into the values of `state`; or a file. Collective."""
        path = self.broadcast(path)
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        model, optimizer, others = _set_up_in(state)
        if model is None:
            raise ConfigError(f"fabric.load(): {path} is a folder; give the model in `state`")
        extra = _load(path, model, optimizer, strict)
        beside = _kept_beside(extra, path, weights_only)
        if strict and others.keys() - beside.keys():
            raise KeyError(f"fabric.load(): {path} lacks {sorted(others.keys() - beside.keys())}")
        # The order is the same on every rank, since loading may be collective.
        for key in [key for key in others if key in beside]:
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(beside.pop(key))
            else:
                state[key] = beside.pop(key)
        return beside


def _named_groups(module: nn.Module, groups: list[dict[str, Any]], names: Any) -> Any:
    """Do what BaseFinetuning does to param groups, of shards too: a parameter's name, or back."""
    sharded: Any = find_sharded(module)
    params = {} if sharded is None else {id(s): p for s, p in sharded.shards_and_params()}
    known = [[params.get(id(p), p) for p in group["params"]] for group in groups]
    pairs = zip(groups, known, strict=True)
    return [{**group, "params": [names[p] for p in of_group]} for group, of_group in pairs]


def _plain(optimizer: Any) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper of it."""
    return vars(optimizer).get("_optimizer", optimizer)


def _visible(path: Any) -> Path:
    """Return where a checkpoint's folder is: a hidden name, as Tuner's, loses its dot."""
    return Path(path).with_name(Path(path).name.lstrip("."))


def _load(path: Any, model: Any, optimizer: Any, is_strict: bool) -> Any:
    """Load what is sharded, and return what was saved beside it. Collective."""
    options: Any = {"is_strict": is_strict, "restores_rngs": optimizer is not None}
    folder, tag = _visible(path).parent, _visible(path).name
    report: Any = zero_engine.load(folder, model, optimizer, tag=tag, **options)
    return report.extra


def _open(path: Any) -> Any:
    return Checkpoint.open(_visible(path).parent, _visible(path).name)


def _kept_beside(extra: Any, path: Any, weights_only: Any) -> Any:
    """Return what Lightning has saved with the tensors of a folder."""
    if not isinstance(extra, dict) or _BESIDE not in extra:
        raise FileError(f"{path} is one of a plain loop, not of Lightning: use zero_engine.load()")
    content = io.BytesIO(extra[_BESIDE].numpy().tobytes())
    return torch.load(content, map_location="cpu", weights_only=weights_only)


def _set_up_in(state: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model in `state` that was set up, its optimizer if there, and all others."""
    values = list(state.values()) if isinstance(state, dict) else []
    model = next((v for v in values if isinstance(v, _Called)), None)
    own = getattr(model and find_sharded(model.module), "optimizer", None)
    # Of several optimizers, `state` may contain each one.
    members = [own, *getattr(own, "optimizers", ())]
    found = [v for v in values if any(v is member for member in members)]
    optimizer = own if own is not None and found else None
    taken = [id(v) for v in (model, *found)]
    others = {k: v for k, v in state.items() if id(v) not in taken} if values else {}
    return model and model.module, optimizer, others
