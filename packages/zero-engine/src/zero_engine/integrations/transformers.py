"""transformers' Trainer over sharded models: another class, and `zero=`; the script stays.

trainer = ZeroTrainer(model=model, args=args, train_dataset=data, zero=ZeroConfig(stage=3))
trainer.train()
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import attrs
import torch
import transformers
import zero_comm
from torch import Tensor, nn
from transformers.integrations import deepspeed as host_deepspeed
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from zero_partition import find_sharded

import zero_engine
from zero_engine import (
    ConfigError,
    DynamicLossScale,
    EngineConfig,
    GatheredParameters,
    LossScaler,
    StaticLossScale,
    ZeroConfig,
)

if TYPE_CHECKING:
    _Trainer = transformers.Trainer
else:
    _Trainer = object

__all__ = ["ZeroSeq2SeqTrainer", "ZeroTrainer"]

Zero = ZeroConfig | str | os.PathLike[str] | Mapping[str, Any] | None

_FOLDER: Final = "zero"  # in a checkpoint's folder: what zero_engine.save() writes
_WORDS: Final = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_OF_HIDDEN_SIZE: Final = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
_DEEPSPEED: Final = (
    "TrainingArguments(deepspeed=...): expected nothing there with ZeroTrainer, got a "
    "configuration; leave deepspeed= out, and write ZeroTrainer(..., zero=THE_SAME_FILE)"
)

# NOTE(prepared): Trainer hands the model and its optimizer to Accelerator.prepare(), which would
# wrap the one in DistributedDataParallel and ask the other, sharded, for its state. What was
# prepared already it leaves as it is: so both are, in parts, when `_wrap_model` shards them.


class _ZeroMixin(_Trainer):
    """What both trainers do otherwise than the host's."""

    def __init__(self, *positional: Any, zero: Zero = None, **named: Any) -> None:
        self._zero, self._sharded = zero, None
        super().__init__(*positional, **named)

    @staticmethod
    def Init(args: transformers.TrainingArguments, zero: Zero = None) -> AbstractContextManager:
        """Build or load a model of which each rank keeps its part only: `zero_engine.Init`.

            with ZeroTrainer.Init(args, zero="ds.json"):
                model = AutoModelForCausalLM.from_pretrained(name)

        Collective at stage 3; below it nothing happens. `model_init` is called within one.

        Args:
            args: As for the trainer, as is `zero`.
            zero: Likewise.

        Raises:
            ConfigError: As for the trainer; or else as for `zero_engine.Init`.
        """
        return zero_engine.Init(config=_read(zero, args, None).zero)

    def create_accelerator_and_postprocess(self) -> None:
        """Also read `zero`, and be asked where Accelerate looks at gradients."""
        self._settings = settings = _read(self._zero, self.args, self.model)
        _refuse(self.args, self.model, settings)
        super().create_accelerator_and_postprocess()
        for name, is_on in (
            ("DeepSpeed", self.is_deepspeed_enabled),
            ("FSDP", self.is_fsdp_enabled),
        ):
            if is_on:
                raise ConfigError(
                    f"ZeroTrainer: expected Accelerate without {name}, got it from its launcher or "
                    "its environment; start with torchrun, or answer no in `accelerate config`"
                )
        accelerator: Any = self.accelerator
        accelerator.no_sync, accelerator.clip_grad_norm_ = self._no_sync, self._clip
        params = settings.zero.precision and settings.zero.precision.params
        mixed = _WORDS.get(params) or accelerator.mixed_precision
        # Not over 16-bit parameters; and on a CPU too, where Accelerate leaves fp16 out.
        accelerator.native_amp = mixed != "no" and params not in _WORDS
        loss_scale = settings.loss_scale
        if loss_scale is None and mixed == "fp16":
            loss_scale = DynamicLossScale(window=2000, hysteresis=1)  # as torch's GradScaler
        elif loss_scale is None and settings.checks_overflow:
            loss_scale = StaticLossScale(1.0)
        accelerator.scaler = None if loss_scale is None else _Scaler(LossScaler(loss_scale))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Also, at stage 3, without a whole model on any rank."""
        with self.Init(self.args, self._zero):
            model = super().call_model_init(trial)
        self._settings = _read(self._zero, self.args, model)
        _refuse(self.args, model, self._settings)
        return model

    # ---- Training ----

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Left to `initialize`: what `Init` has built is there, and must not be converted."""

    def create_optimizer(self, *model: Any) -> Any:
        """Also leave to `zero` what its file names."""
        if self.optimizer is None and self._settings.optimizer is not None:
            return None  # made when the model is sharded
        return super().create_optimizer(*model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Also that of a DeepSpeed file, with the numbers of steps that it leaves "auto"."""
        spec = self._settings.scheduler
        if self.lr_scheduler is not None or spec is None:
            return super().create_scheduler(num_training_steps, optimizer)
        known = {
            "scheduler.params.total_num_steps": num_training_steps,
            "scheduler.params.warmup_num_steps": max(
                1, self.args.get_warmup_steps(num_training_steps)
            ),
        }
        left_open = {row.key for row in self._settings.sources if row.origin == "auto"}
        steps = {key.rpartition(".")[2]: known[key] for key in known.keys() & left_open}
        make = getattr(zero_engine, spec.type)
        self.lr_scheduler = make(optimizer or self.optimizer, **spec.params | steps)
        self._created_lr_scheduler = True  # so that the next train() makes another
        return self.lr_scheduler

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Shard the model and the optimizer, the first time, also for an evaluation."""
        self._shard(is_training=training)
        return self._prepared if training else model

    def _shard(self, *, is_training: bool = False) -> None:
        model, accelerator = self.model, self.accelerator
        if model is self._sharded or (not is_training and find_sharded(model) is not None):
            return
        if zero_comm.init().world_size != self.args.world_size:
            raise ConfigError(
                f"ZeroTrainer: expected as many processes as Accelerate sees, "
                f"{self.args.world_size}, got WORLD_SIZE={os.environ.get('WORLD_SIZE')}; on a CPU "
                "say use_cpu=True in TrainingArguments"
            )
        is_trained = is_training or any(param.requires_grad for param in model.parameters())
        optimizer = self.create_optimizer() if is_trained else None
        micro = self._settings.micro_batch_size
        settings = attrs.evolve(  # steps and schedule are Trainer's
            self._settings,
            optimizer=self._settings.optimizer if is_trained else None,
            scheduler=None,
            accumulation_steps=1,
            train_batch_size=micro * self.args.world_size,
        )
        _, optimizer, _, _ = zero_engine.initialize(
            model=model, optimizer=optimizer, config=settings
        )
        if optimizer is not None:  # see NOTE(prepared)
            self.optimizer = accelerator.prepare(optimizer, device_placement=[False])
        self._prepared = accelerator.prepare_model(
            model, device_placement=False, evaluation_mode=True
        )
        self._prepared._is_accelerate_prepared = True
        self._sharded = model

    def _no_sync(self, model: Any) -> AbstractContextManager:
        """Accelerator.no_sync: where gradients are kept whole, they are added up and reduced once."""
        return zero_engine.no_sync(self.model) if self._stage < 2 else nullcontext()

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Accelerator.clip_grad_norm_: by the norm over all ranks; infinity clips nothing."""
        scaler: Any = self.accelerator.scaler
        if scaler is None:
            return zero_engine.clip_grad_norm_(self.model, max_norm, norm_type)
        return scaler.unscale_(self.model, None if math.isinf(max_norm) else max_norm)

    @property
    def _stage(self) -> int:
        return self._settings.zero.stage

    # ---- Files ----

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Also gather what is to be written: all on rank 0, or an adapter alone."""
        self._shard()
        adapters = getattr(self.model, "peft_config", None)
        if state_dict is not None:
            super()._save(output_dir, state_dict)
        elif adapters is None:
            super()._save(output_dir, zero_engine.full_state_dict(self.model))
        else:
            params = {
                name: param
                for name, param in self.model.named_parameters()
                if param.requires_grad or not adapters.keys().isdisjoint(name.split("."))
            }
            with GatheredParameters(params.values()):
                values = {name: param.detach() for name, param in params.items()}
                super()._save(output_dir, values | dict(self.model.named_buffers()))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        zero_engine.save(
            Path(output_dir, _FOLDER),
            self.model,
            self._plain_optimizer(),
            step=self.state.global_step,
            exclude_frozen=hasattr(self.model, "peft_config"),
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights alone; with the optimizer's state they come when that is sharded."""
        if Path(resume_from_checkpoint, _FOLDER).is_dir():
            return
        if hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            zero_engine.load_pretrained(self.model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        ours, plain = Path(checkpoint, _FOLDER), Path(checkpoint, OPTIMIZER_NAME)
        scheduler = Path(checkpoint, SCHEDULER_NAME)
        if ours.is_dir():
            zero_engine.load(ours, self.model, self._plain_optimizer(), restores_rngs=False)
        elif plain.is_file():  # Trainer's own
            is_first = self.args.process_index == 0
            state = torch.load(plain, map_location="cpu", weights_only=True) if is_first else {}
            zero_engine.load_full_optimizer_state_dict(self.model, state)
        if scheduler.is_file():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        best: Any = self.state.best_model_checkpoint
        if Path(best, _FOLDER).is_dir():
            zero_engine.load(Path(best, _FOLDER), self.model, restores_rngs=False)
        else:
            zero_engine.load_pretrained(self.model, best)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer  # type: ignore[union-attr]  # of Accelerate's


@final
class ZeroTrainer(_ZeroMixin, transformers.Trainer):
    """transformers' Trainer over a model sharded by ZeRO. Collective, as Trainer is.

    All of Trainer's arguments, methods and callbacks stay. The model and its optimizer are sharded
    where Trainer would wrap them for DistributedDataParallel, at the first `train()`, `evaluate()`,
    `predict()` or `save_model()`; numbers are those of DistributedDataParallel. A checkpoint's
    folder holds what `zero_engine.save` writes in place of `optimizer.pt`, and is resumed from at
    any number of ranks and any stage. `save_model()` writes what `from_pretrained` reads, which
    takes the whole model in rank 0's host memory; of a PEFT model the adapters alone.

    Args:
        *positional: Trainer's, in its order.
        zero: A ZeroConfig; or a DeepSpeed file, by path or as a dict, whose "auto" values are those
            of `args`, as Trainer fills them. `ZeroConfig()`, stage 3, when None. With
            `Precision(params=...)` in 16 bits, parameters are of that dtype, with fp32 masters, and
            there is no autocast; without, `bf16=True` or `fp16=True` is autocast as in Trainer.
        **named: Trainer's.

    Raises:
        ConfigError: `zero` cannot be, or `args` or the model ask for another way to distribute,
            or for what sharding cannot do: it names the line to change.
    """


@final
class ZeroSeq2SeqTrainer(_ZeroMixin, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer over a model sharded by ZeRO; see `ZeroTrainer`.

    With `predict_with_generate`, at stage 3, ranks generate in step: `synced_gpus=True`.
    `with zero_engine.unsharded(trainer.model):` around `predict()` needs the memory of the whole
    model and no communication.
    """

    def evaluate(self, *args: Any, **named: Any) -> Any:
        """As Seq2SeqTrainer's."""
        return super().evaluate(*args, **self._in_step() | named)

    def predict(self, *args: Any, **named: Any) -> Any:
        """As Seq2SeqTrainer's."""
        return super().predict(*args, **self._in_step() | named)

    def _in_step(self) -> dict[str, Any]:
        return {"synced_gpus": self._stage == 3 and self.args.world_size > 1}


@final
@attrs.define(eq=False)
class _Scaler:
    """A LossScaler with the methods that Accelerate calls on torch's GradScaler."""

    _scaler: LossScaler
    _is_finite: bool | None = None  # what is known of the gradients of the step at hand

    def scale(self, loss: Tensor) -> Tensor:
        return loss.float() * self._scaler.scale

    def unscale_(self, target: Any, max_norm: float | None = None) -> Tensor:
        report = zero_engine.unscale_and_clip_(target, scale=self._scaler.scale, max_norm=max_norm)
        self._is_finite = report.is_finite
        return report.norm

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
        if self._is_finite is None:
            self.unscale_(optimizer)
        if self._is_finite:
            optimizer.step(closure)

    def update(self) -> None:
        self._scaler.update(overflowed=not self._is_finite)
        self._is_finite = None

    def state_dict(self) -> dict[str, float | int]:
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(state_dict)


def _read(zero: Zero, args: Any, model: nn.Module | None) -> EngineConfig:
    """What `zero` says, with what Trainer fills in; without a model it is for its stage alone."""
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    batch = micro * accumulation * args.world_size
    if zero is None or isinstance(zero, ZeroConfig):
        return EngineConfig(
            zero=zero or ZeroConfig(),
            train_batch_size=batch,
            micro_batch_size=micro,
            accumulation_steps=accumulation,
        )
    auto = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "fp16.enabled": args.fp16,
        "bf16.enabled": args.bf16,
    }
    implied = dict.fromkeys(_OF_HIDDEN_SIZE if model is None else (), 1)
    implied |= {f"scheduler.params.{name}_num_steps": 1 for name in ("total", "warmup")}
    settings = EngineConfig.from_deepspeed(
        zero, world_size=args.world_size, model=model, auto=auto, implied=implied
    )
    precision = settings.zero.precision
    if precision is None or precision.masters is None:
        return settings
    # Masters lie beside shards: as `initialize` does with such a file.
    return attrs.evolve(
        settings, zero=attrs.evolve(settings.zero, stage=max(settings.zero.stage, 1))
    )


def _refuse(args: Any, model: Any, settings: EngineConfig) -> None:
    for is_so, message in _refusals(args, model, settings):
        if is_so:
            raise ConfigError(message)


def _refusals(args: Any, model: Any, settings: EngineConfig) -> Iterator[tuple[bool, str]]:
    """What cannot be beside ZeRO, each with the line to change."""

    def given(name: str) -> bool:
        return bool(getattr(args, name, None))

    yield given("deepspeed") or given("deepspeed_plugin"), _DEEPSPEED
    yield (
        given("fsdp"),
        f"TrainingArguments(fsdp={getattr(args, 'fsdp', None)!r}): expected nothing there with "
        "ZeroTrainer; leave fsdp= out: zero=ZeroConfig(stage=3) is its full_shard, stage=2 its "
        "shard_grad_op",
    )
    yield (
        args.n_gpu > 1,
        f"ZeroTrainer: expected one process for each GPU, got one for {args.n_gpu}, which is "
        f"DataParallel; start it with: torchrun --nproc-per-node={args.n_gpu} script.py",
    )
    yield (
        given("torch_compile") and settings.zero.stage == 3,
        "TrainingArguments(torch_compile=True): expected False at stage 3, which gathers between "
        "the blocks of a model; leave it out, and compile each block: "
        "for layer in model.model.layers: layer.compile()",
    )
    yield (
        given("bf16_full_eval") or given("fp16_full_eval"),
        "TrainingArguments(bf16_full_eval=..., fp16_full_eval=...): expected False, as a sharded "
        "model cannot be converted; leave them out: bf16=True evaluates under autocast",
    )
    yield (
        given("save_on_each_node"),
        "TrainingArguments(save_on_each_node=True): expected False, as rank 0 writes the whole "
        "model; leave it out, and let output_dir be a folder that all nodes see",
    )
    asked = settings.autocast_dtype or (settings.zero.precision and settings.zero.precision.params)
    word = _WORDS.get(asked, "no")
    yield (
        word != args.mixed_precision
        and (settings.autocast_dtype or args.mixed_precision != "no")
        and asked is not None,
        f"TrainingArguments(fp16=..., bf16=...): expected {word}, as zero= says, got "
        f"{args.mixed_precision}; change one of them",
    )
    yield (
        getattr(model, "hf_device_map", None) is not None
        or bool(getattr(model, "is_distributed_loading_by_transformers", False)),
        "from_pretrained(device_map=..., distributed_config=...): expected a model on one device, "
        "which ZeroTrainer distributes; leave them out, and load it in `with "
        "ZeroTrainer.Init(args, zero=...):`, so that no rank holds all of it",
    )
    yield (
        given("save_only_model") and given("load_best_model_at_end")
        and settings.zero.stage == 3 and hasattr(model, "peft_config"),
        "TrainingArguments(save_only_model=True): expected False with load_best_model_at_end at "
        "stage 3, where PEFT cannot load an adapter into what is sharded; leave it out",
    )
    names = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")
    yield (
        any(getattr(model, name, False) for name in names),
        "from_pretrained(quantization_config=...): expected parameters of a floating-point dtype, "
        "got a quantized model; leave it out, and load with dtype=torch.bfloat16",
    )


def _no_deepspeed(*_: Any) -> None:
    raise ConfigError(_DEEPSPEED)


if not host_deepspeed.is_deepspeed_available():
    # TrainingArguments(deepspeed=...) would only say that the package is missing.
    host_deepspeed.HfTrainerDeepSpeedConfig = _no_deepspeed  # type: ignore[assignment, misc]
