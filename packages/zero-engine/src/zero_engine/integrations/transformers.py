"""transformers' Trainer over sharded models: another class, and `zero=`; the script stays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import transformers
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from transformers.integrations import deepspeed as host_deepspeed
from zero_comm.logs import warn_user
from zero_partition.seams import find_sharded, require_sharded

import zero_engine
from zero_engine import ConfigError, Precision, ZeroConfig
from zero_engine.engine import DynamicLossScale, EngineConfig, LossScaler, StaticLossScale

Zero = ZeroConfig | str | os.PathLike[str] | Mapping[str, Any] | None

_WORDS: Final[dict[Any, str]] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# Argument of TrainingArguments or from_pretrained() -> what to do instead.
_REFUSED: Final = {
    "deepspeed": "write ZeroTrainer(..., zero=THE_SAME_FILE), and start with torchrun",
    "fsdp": "zero=ZeroConfig(stage=3) is its full_shard, stage=2 its shard_grad_op",
    "save_on_each_node": "rank 0 has the model; let output_dir be a folder that all nodes see",
    "torch_compile": "compile each block: for layer in model.model.layers: layer.compile()",
    "device_map": "load it in `with ZeroTrainer.Init(args, zero=...):`, which shards it at once",
}
_LAUNCHED: Final = "ACCELERATE_USE_"


class ZeroTrainer(transformers.Trainer):
    """transformers' Trainer over a model sharded by ZeRO. Collective, as Trainer is.

        trainer = ZeroTrainer(model, args, train_dataset=data, zero=ZeroConfig(stage=3))
        trainer.train()

    Trainer's arguments, methods, callbacks and numbers, those of DistributedDataParallel, stay. The
    first `train()`, `evaluate()`, `predict()` or `save_model()` shards the model and its optimizer,
    in place; another trainer over the same model shards it anew. A checkpoint has what
    `zero_engine.save` writes in place of `optimizer.pt`; it is resumed from at any number of ranks,
    stage and residence, and so is one of Trainer's own. `save_model()` writes what
    `from_pretrained` reads, by way of rank 0's host memory; of a PEFT model the adapters alone.

    Args:
        *positional: Trainer's, in its order.
        zero: A ZeroConfig; or a DeepSpeed file, by path or as a dict, whose "auto" values are those
            of `args`, as Trainer fills them. `ZeroConfig()`, stage 3, when None. With
            `Precision(params=...)` of 16 bits, or that in a file, there is no autocast; without,
            `bf16=True` and `fp16=True` are autocast, as in Trainer.
        **named: Trainer's.

    Raises:
        ConfigError: `zero` cannot be, or `args` or the model ask for what cannot be beside it: it
            names the line to change.
    """

    model: Any
    optimizer: Any
    accelerator: Any

    def __init__(self, *positional: Any, zero: Zero = None, **named: Any) -> None:
        self._zero = zero
        self._sharded: Any = None
        super().__init__(*positional, **named)

    @staticmethod
    def Init(
        args: transformers.TrainingArguments, zero: Zero = None
    ) -> AbstractContextManager[Any]:
        """Build or load a model of which each rank keeps its part only: `zero_engine.Init`.

            with ZeroTrainer.Init(args, zero="ds.json"):
                model = AutoModelForCausalLM.from_pretrained(name)

        Collective at stage 3; below it nothing happens. `model_init` enters it by itself.

        Args:
            args: As for the trainer.
            zero: As for the trainer.

        Raises:
            ConfigError: As for the trainer, or else as for `zero_engine.Init`.
        """
        return zero_engine.Init(config=_read(zero, args, None).zero)

    def create_accelerator_and_postprocess(self) -> None:
        """Also read `zero`, and be asked where Accelerate looks at gradients."""
        self._settings = settings = _read(self._zero, self.args, self.model)
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.no_sync, accelerator.clip_grad_norm_ = self._no_sync, self._clip
        params = settings.zero.precision and settings.zero.precision.params
        mixed = _WORDS.get(params) or accelerator.mixed_precision
        # Autocast to fp16 on a CPU too, where Accelerate has none, but not over 16-bit parameters.
        accelerator.native_amp |= mixed == "fp16"
        accelerator.native_amp &= params not in _WORDS
        scale = settings.loss_scale
        if scale is None and mixed == "fp16":
            # The settings of torch's GradScaler.
            scale = DynamicLossScale(window=2000, hysteresis=1)
        elif scale is None and settings.checks_overflow:
            scale = StaticLossScale(1.0)
        accelerator.scaler = None if scale is None else _Scaler(LossScaler(scale))

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Do nothing: `initialize` moves the model; one that `Init` built must not be converted."""

    def create_optimizer(self, *model: Any, **named: Any) -> Any:
        """Create Trainer's optimizer; None if the file names one, which `initialize` creates."""
        if self.optimizer is None and self._settings.optimizer is not None:
            return None
        return super().create_optimizer(*model, **named)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler of the file, its "auto" numbers of steps filled in, or Trainer's."""
        make = _read(self._zero, self.args, self.model, num_training_steps).scheduler
        if self.lr_scheduler is None and make is not None:
            self.lr_scheduler = make(optimizer or self.optimizer)
            # Tells the next train() to create another scheduler.
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Shard the model and the optimizer, the first time, also for an evaluation.

        Trainer passes both to Accelerator.prepare(), which would wrap the model and ask the
        optimizer for its state. It skips what is prepared, so each is prepared here by itself.
        """
        whole, accelerator = self.model, self.accelerator
        is_new = whole is not self._sharded and (training or find_sharded(whole) is None)
        full_eval = None if training or self.is_in_train else self._full_eval_dtype()
        if is_new or full_eval not in (None, next(whole.parameters()).dtype):
            # `model_init` may have created another model.
            self._settings = _read(self._zero, self.args, whole)
            is_trained = training or any(param.requires_grad for param in whole.parameters())
            zero = self._settings.zero
            # The optimizer continues with its masters.
            if full_eval is not None:
                masters = torch.float32 if is_trained and zero.stage else None
                precision = Precision(params=full_eval, masters=masters)
                zero = attrs.evolve(zero, precision=precision)
            optimizer = self.create_optimizer() if is_trained else None
            _, optimizer, _, _ = zero_engine.initialize(
                model=whole,
                # The optimizer may be inside Accelerate's wrapper. The scheduler is Trainer's own.
                optimizer=getattr(optimizer, "optimizer", optimizer),
                config=attrs.evolve(self._settings, zero=zero, scheduler=None),
            )
            if optimizer is not None:
                self.optimizer = accelerator.prepare(optimizer, device_placement=[False])
            self.model_wrapped = accelerator.prepare_model(whole, False, evaluation_mode=True)
            self.model_wrapped._is_accelerate_prepared = True
            if self._settings.zero.stage == 3 and self.args.world_size > 1:
                # With this mark, generate() and layerdrop keep ranks in step.
                for module in whole.modules():
                    module._is_fsdp_managed_module = True
            sharded: Any = find_sharded(whole)
            sharded.removers.append(partial(_unprepare, whole))
            self._sharded = whole
        return self.model_wrapped if training else model

    def _full_eval_dtype(self) -> torch.dtype | None:
        """Return what Trainer converts the model to where it evaluates and does not train."""
        if self.args.bf16_full_eval:
            return torch.bfloat16
        return torch.float16 if self.args.fp16_full_eval else None

    def _no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Accelerator.no_sync: gradients that are kept whole anyway are reduced once."""
        return zero_engine.no_sync(self.model) if self._settings.zero.stage < 2 else nullcontext()

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Accelerator.clip_grad_norm_, by the norm over all ranks; infinity clips nothing."""
        if self.accelerator.scaler is not None:
            return self.accelerator.scaler.unscale_(self.model, max_norm)
        return zero_engine.clip_grad_norm_(self.model, max_norm, norm_type)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Gather what is to be written, all on rank 0 or adapters alone, and save it."""
        self._wrap_model(self.model, training=False)
        require_sharded(self.model).refuse_own_ranks("Trainer.save_model()")
        adapters = getattr(self.model, "peft_config", {}).keys()
        if state_dict is None and adapters:
            state_dict = dict(self.model.named_buffers()) | {
                name: zero_engine.full_param(param, to_rank=0)
                for name, param in self.model.named_parameters()
                if param.requires_grad or not adapters.isdisjoint(name.split("."))
            }
        elif state_dict is None:
            state_dict = zero_engine.full_state_dict(self.model)
        named = self.model.named_parameters(remove_duplicate=False)
        values = {id(param): state_dict[name] for name, param in named if name in state_dict}
        sharded: Any = find_sharded(self.model)
        # Libraries that take part in saving read the values from the model, or from a part of it.
        with sharded.exporting(values):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # The optimizer is inside Accelerate's wrapper.
        folder, optimizer = Path(output_dir, "zero"), self.optimizer.optimizer
        options: Any = {"step": self.state.global_step, "scheduler": self.lr_scheduler}
        is_peft = hasattr(self.model, "peft_config")
        zero_engine.save(folder, self.model, optimizer, exclude_frozen=is_peft, **options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights from a checkpoint, of our own only if the model is sharded.

        Otherwise `_load_optimizer_and_scheduler` loads them with the optimizer's state.
        """
        if (ours := Path(resume_from_checkpoint, "zero")).is_dir():
            if self.model is self._sharded:
                zero_engine.load(ours, self.model, restores_rngs=False)
        elif hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            zero_engine.load_pretrained(self.model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint is None:
            return
        ours, optimizer = Path(checkpoint, "zero"), self.optimizer.optimizer
        options: Any = {"scheduler": self.lr_scheduler, "restores_rngs": False}
        files = [Path(checkpoint, name) for name in ("optimizer.pt", "scheduler.pt")]
        if ours.is_dir():
            zero_engine.load(ours, self.model, optimizer, **options)
        elif all(file.is_file() for file in files):
            # Files of transformers' own Trainer under DDP.
            state, schedule = (torch.load(f, map_location="cpu", weights_only=True) for f in files)
            zero_engine.load_full_optimizer_state_dict(self.model, state)
            options["scheduler"].load_state_dict(schedule)
        # With save_only_model=True there is neither, and both begin anew, as in Trainer.

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class ZeroSeq2SeqTrainer(ZeroTrainer, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer over a model sharded by ZeRO: all else is as in `ZeroTrainer`.

    With `predict_with_generate` at stage 3, ranks generate in step (`synced_gpus`).
    """


def _unprepare(model: nn.Module) -> None:
    """Undo what a trainer has put on a model that it sharded, for the next one to find it plain."""
    own = vars(model)
    own.pop("_is_accelerate_prepared", None)
    original = own.pop("_original_forward", None)
    if original is not None:
        del own["forward"]
        if getattr(original, "__func__", None) is not type(model).forward:
            model.forward = original
    for module in model.modules():
        vars(module).pop("_is_fsdp_managed_module", None)


class _Scaler:
    """A LossScaler with the methods that Accelerate calls on torch's GradScaler."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        # Whether the gradients of the current step are finite; None while that is not known.
        self._is_finite: bool | None = None
        self.state_dict, self.load_state_dict = scaler.state_dict, scaler.load_state_dict

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


def _read(zero: Zero, args: Any, model: Any, num_training_steps: int = 1) -> EngineConfig:
    """Return the settings of `zero`, with "auto" values from Trainer's arguments.

    Without a model, sizes that depend on it are placeholders.
    """
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if zero is None or isinstance(zero, ZeroConfig):
        settings = EngineConfig(train_batch_size=1, micro_batch_size=1, zero=zero or ZeroConfig())
        return _checked(settings, args, model)
    if not isinstance(zero, str | os.PathLike | Mapping):
        raise ConfigError(
            "zero=: expected a ZeroConfig, such as ZeroConfig(stage=3), or a DeepSpeed file, by "
            f"path or as a dict, got {zero!r}"
        )
    auto = {
        "train_batch_size": micro * accumulation * args.world_size,
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
    implied = {
        "scheduler.params.total_num_steps": num_training_steps,
        "scheduler.params.warmup_num_steps": max(1, args.get_warmup_steps(num_training_steps)),
    }
    if model is None:
        sizes = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        implied |= {f"zero_optimization.{name}": 1 for name in sizes}
    try:
        settings = EngineConfig.from_deepspeed(
            zero, world_size=args.world_size, model=model, auto=auto, implied=implied
        )
    except ConfigError as error:
        if "as auto=" in str(error):
            error.add_note(
                "What auto= says is of TrainingArguments; train_batch_size is "
                "per_device_train_batch_size x gradient_accumulation_steps x ranks, here "
                f"{micro} x {accumulation} x {args.world_size}"
            )
        raise
    if settings.monitor is not None:
        said = "report_to and logging_steps say what is shown"
        warn_user(f"{settings.monitor}: {said}")
    return _checked(settings, args, model)


def _is_spread(model: Any) -> bool:
    devices = getattr(model, "hf_device_map", None) or {}
    # A quantised model has a map of one device.
    return len(set(devices.values())) > 1


def _checked(settings: EngineConfig, args: Any, model: Any) -> EngineConfig:
    """Return the settings for one micro-batch a step, as Trainer counts them.

    Raises:
        ConfigError: `args`, the model or the environment ask for what cannot be with `settings`.
    """
    zero, world_size = settings.zero, args.world_size
    for argument in _REFUSED:
        is_of_model = argument == "device_map"
        asked = _is_spread(model) if is_of_model else getattr(args, argument, None)
        asked = asked or parse_flag_from_env(_LAUNCHED + argument.upper())
        if asked and (argument != "torch_compile" or zero.stage == 3):
            where = "from_pretrained" if is_of_model else "TrainingArguments"
            raise ConfigError(
                f"{where}({argument}=...), or {_LAUNCHED}{argument.upper()} in the environment: "
                f"not with ZeroTrainer; leave {argument}= out: {_REFUSED[argument]}"
            )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    said = _WORDS.get(settings.autocast_dtype or (zero.precision and zero.precision.params))
    wrong = {
        f"Accelerate to see all {started} processes (WORLD_SIZE), got {world_size}: each would "
        "train alone; on a CPU, say TrainingArguments(use_cpu=True)": started > world_size,
        f"one process for each GPU, got one for {args.n_gpu}, which is DataParallel; start it by: "
        f"torchrun --nproc-per-node={args.n_gpu} script.py": args.n_gpu > 1,
        f"{said}, as zero= says, got {args.mixed_precision}; change one of them": said
        and said != args.mixed_precision
        and (settings.autocast_dtype or args.mixed_precision != "no"),
    }
    for expected, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"ZeroTrainer: expected {expected}")
    size = settings.micro_batch_size * world_size
    return attrs.evolve(settings, accumulation_steps=1, train_batch_size=size)


def _tell(*_: Any) -> Any:
    raise ConfigError(f"TrainingArguments(deepspeed=...): leave it out; {_REFUSED['deepspeed']}")


if not host_deepspeed.is_deepspeed_available():
    host_deepspeed.HfTrainerDeepSpeedConfig = _tell  # type: ignore[assignment, misc]
