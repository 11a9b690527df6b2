"""Engine: DeepSpeed's training loop for a model that shard() has sharded."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Final, final

import torch
import zero_partition
import zero_partition.seams
from torch import Tensor, nn
from zero_comm import Group, collective
from zero_comm.logs import warn_user
from zero_comm.ranges import ranged
from zero_partition import StateError

from zero_engine.checkpoint.export import write_weights
from zero_engine.checkpoint.folder import check_folder, find_complete, run_on_all_ranks
from zero_engine.checkpoint.load import load
from zero_engine.checkpoint.save import save_as, warn_of_gradients
from zero_engine.checkpoint.writer import SaveRequest
from zero_engine.checks import check_flag, check_number
from zero_engine.errors import ConfigError, LossScaleError
from zero_engine.readers import AbstractReader, find_reader
from zero_engine.state_offload import offload_as_deepspeed, reload_states
from zero_engine.torch_private import current_backward, is_in_functional_transform

from .engine_config import EngineConfig
from .loss_scale import LossScaler, PendingOverflow, StaticLossScale, has_state, remember

# NOTE(boundary): a micro-batch ends with step(). At stages 0 and 1, where gradients are not
# sharded, the engine is inside no_sync until the micro-batch that ends with a step of the optimizer
# begins. So backward may be called by the engine or by the user, and on any loss.

# NOTE(direct): in a backward that no engine runs, gradients are divided by the number of
# micro-batches where they enter the model, at the outputs of `forward`. An output may be computed
# from another one, as a loss is from logits. If there are several, the user gets views, which only
# gradients from outside pass through, so that nothing is divided twice.

# NOTE(scale): a loss is multiplied by the loss scale in fp32: in fp16 the product would overflow.

_TIMEOUT_S: Final = 60.0
_COUNTERS: Final = ("global_steps", "micro_steps", "global_samples", "_skipped_steps")


@final
class Engine(nn.Module):
    """A sharded model with its optimizer and scheduler; made by `initialize`.

        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    Call all three once per micro-batch; `step` changes weights only at a boundary, which is once in
    `gradient_accumulation_steps()` calls. Attributes that the engine lacks are looked for in the
    model. Names of parameters begin with "module.", as in DeepSpeed; those of `engine.module` are
    the model's own.

    `loss.backward()` works as well: for losses of several engines added up, or gradients given by
    hand. Gradients are then divided by the number of micro-batches where they enter the engine's
    outputs, as in DeepSpeed, but not where they enter those of `engine.module(batch)`. If the loss
    is scaled (fp16), call `engine.scale(loss).backward()` instead. A plain `loss.backward()` raises
    if `EngineConfig.needs_scaled_loss` is set. Otherwise it does not raise, and `step` warns.

    Attributes:
        module: The model, as `shard` left it.
        optimizer: The torch optimizer, over shards; None for inference.
        global_steps: Boundaries so far, those of skipped steps included.
        micro_steps: Calls of `step` so far.
        global_samples: Samples of all ranks in those global steps. Where every step is a boundary,
            each call of `backward` counts as a micro-batch.
    """

    # Engines whose `backward` is running; a loss may be of several.
    _running: ClassVar[list[Engine]] = []

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: EngineConfig,
        *,
        group: Group,
        data: Group,
        lr_scheduler: Any = None,
        across: Group | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self.config = config
        self.group = group
        # Ranks that samples are divided among.
        self._data = data
        self._across = across
        self._is_late = self.device.type != "cpu"  # see NOTE(verdict)
        scale = config.loss_scale
        self._loss_scaler = None if scale is None else LossScaler(scale)
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._skipped_steps = 0
        # Micro-batches of one global step.
        self._num_micro_batches = config.accumulation_steps
        # Micro-batches since the last boundary.
        self._num_pending = 0
        # Whether the next micro-batch ends with a boundary, as the user set it. None: count.
        self._is_boundary = None if config.manages_accumulation else True
        self._micro_batch_size = config.micro_batch_size
        self._norm: Tensor | None = None
        self._was_applied = self._was_skipped = False
        # Outcome of the last step while it is not known yet; None otherwise.
        self._verdict: PendingOverflow | None = None
        self._was_scaled = self._is_destroyed = self._is_compiled = False
        # Number, by `current_backward`, of the last backward through a scaled loss.
        self._scaled_backward = -1
        # Backwards since the last boundary. Each is a micro-batch where every step is a boundary.
        self._num_backwards = 0
        # Contexts of `no_sync` that the user has entered.
        self._open_no_sync = 0
        self._monitor = None
        if config.monitor is not None and self.global_rank == 0:
            self._monitor = config.monitor(module)
        self._waiting = ExitStack()  # see NOTE(boundary)
        self._wait_or_not()

    # ---- The loop ----

    @ranged("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model under the configured autocast; return its outputs. Collective."""
        self._check_alive("forward")
        try:
            with self._autocast():
                outputs = self.module(*args, **kwargs)
        except RuntimeError as error:
            # Of torch's operators; errors of ours and of memory are subclasses.
            if type(error) is RuntimeError and "type" in str(error):
                self._note_dtypes(error, [*args, *kwargs.values()])
            raise
        return self._watched(outputs)

    @ranged("backward")
    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        gradient: Tensor | None = None,
    ) -> Tensor:
        """Run backward of a loss, divided by the number of micro-batches and scaled. Collective.

        Args:
            loss: A scalar; or of any shape, with `gradient`.
            retain_graph: Whether another backward of the same graph follows.
            scale_wrt_gas: Divide by `gradient_accumulation_steps()`.
            gradient: Gradient of the loss's shape, which `loss.backward(gradient)` is given.

        Returns:
            The loss, divided but not scaled.

        Raises:
            ConfigError: `loss` is no tensor, or no scalar and there is no `gradient`.
            zero_partition.StateError: The engine was destroyed, or `loss` requires no gradient.
        """
        self._check_alive("backward()")
        if not isinstance(loss, Tensor):
            raise ConfigError(f"Engine.backward(): expected a tensor, got {loss!r}")
        if gradient is None and loss.numel() != 1:
            raise ConfigError(
                f"Engine.backward(): expected a scalar, got a loss of shape {tuple(loss.shape)}; "
                "pass its mean, or gradient=... of that shape"
            )
        if not loss.requires_grad:
            raise StateError(
                "Engine.backward(): the loss depends on no trainable parameter "
                f"(rank {self.group.rank}); was it computed under no_grad, or detached?"
            )
        count = self.gradient_accumulation_steps()
        if scale_wrt_gas and count > 1:
            loss = loss / count
        if self._monitor is not None:
            self._monitor.note_loss(self.global_samples, loss.detach().float().mean())
        self._num_backwards += 1
        self._running.append(self)
        try:
            self.scale(loss).backward(gradient, retain_graph=retain_graph)
        finally:
            self._running.remove(self)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale, for a backward that the engine does not run. Local."""
        self._was_scaled = True
        if self._verdict is not None and self._verdict.loss_scale is not None:
            scaled = loss.float() * self._verdict.loss_scale
        elif self._loss_scaler is None:
            return loss
        else:
            scaled = loss.float() * self.cur_scale
        if scaled.requires_grad:
            scaled.register_hook(self._note_scaled)
        return scaled

    @collective
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch. At a boundary: unscale, clip, step, advance the scheduler. Collective.

        Gradients are dropped then. Where a gradient on any rank is inf or nan, no rank steps:
        weights, optimizer and scheduler stay as they are, and `was_step_applied()` is False. An
        engine that neither scales losses nor `checks_overflow` steps all the same, unclipped.

        On CUDA a fused optimizer skips its step on the device. The host learns of it in the next
        `step`, or when it asks: `was_step_applied()`, `cur_scale`, `get_lr()`, `lr_scheduler` wait.
        Until then, a scheduler that is used outside the engine is a step ahead after a skipped one.

        Args:
            lr_kwargs: Arguments of `lr_scheduler.step`.

        Raises:
            ConfigError: The engine has no optimizer, or `lr_scheduler.step` takes something else;
                nothing was done.
            LossScaleError: The loss scale would have to get too small, and is configured to raise.
            zero_partition.StateError: Inside `no_sync` or `coalesce_grad_reduction`, or after
                `destroy`; nothing was done.
        """
        self._check_alive("step()")
        self._apply_pending()
        if self._open_no_sync:
            raise StateError(
                "Engine.step() inside no_sync() or coalesce_grad_reduction(): gradients were not "
                f"reduced yet (rank {self.group.rank}); leave the context first"
            )
        if self.cur_scale != 1.0 and not self._was_scaled and self.group.rank == 0:
            warn_user(
                f"Engine.step(): gradients are divided by the loss scale {self.cur_scale:g}, but "
                "the engine multiplied no loss by it; unless you did, use engine.backward(loss), "
                "or engine.scale(loss).backward()",
            )
        is_boundary, optimizer = self.is_gradient_accumulation_boundary(), self.optimizer
        if is_boundary and optimizer is None:
            raise ConfigError(
                "Engine.step(): the engine has no optimizer; pass one to initialize(), or name one "
                'in the configuration: "optimizer": {"type": "AdamW", "params": {...}}'
            )
        if is_boundary and self._lr_scheduler is not None:
            _check_step(self._lr_scheduler, lr_kwargs or {})
        self._was_applied = self._was_scaled = False
        if is_boundary and optimizer is not None:
            self._take_step(optimizer, lr_kwargs or {})
        self.micro_steps += 1
        self._num_pending = 0 if is_boundary else self._num_pending + 1
        self._wait_or_not()

    def _take_step(self, optimizer: torch.optim.Optimizer, lr_kwargs: dict[str, Any]) -> None:
        checks = self.config.checks_overflow or self._loss_scaler is not None
        report = zero_partition.unscale_and_clip_(
            self.module,
            scale=self.cur_scale,
            max_norm=self.config.max_norm or None,
            across=self._across,
            in_step=checks and (self._lr_scheduler is None or has_state(self._lr_scheduler)),
        )
        self._norm = report.norm
        self.global_steps += 1
        self.global_samples += self._num_samples()
        self._num_backwards = 0
        is_late = report.is_in_step and self._is_late  # see NOTE(verdict)
        may_apply = is_late or not checks or report.is_finite
        if report.is_in_step or may_apply:
            optimizer.step()
        optimizer.zero_grad()
        if is_late:
            undo = remember(self._lr_scheduler, optimizer)
            self._verdict = PendingOverflow.of(report.finite, self._loss_scaler, undo)
        if may_apply and self._lr_scheduler is not None:
            self._lr_scheduler.step(**lr_kwargs)
        if not is_late:
            self._learn(may_apply)
        if self._monitor is not None:
            scale = {} if self._loss_scaler is None else {"loss_scale": self.cur_scale}
            row = {"lr": float(self.get_lr()[0]), **scale}
            self._monitor.step(self.global_steps, self.global_samples, row)

    # ---- Between phases ----

    @collective
    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Offload states as `zero_engine.offload_states`, by DeepSpeed's names. Collective.

        Args:
            include: Of "lp_params", "hp_params" (masters), "lp_grads", "optim_states" and
                "contiguous_grad_buffer", or enumeration members of those values; all when None.
            device: "cpu", or an enumeration member of that value.
            pin_memory: Page-lock host memory, where there is an accelerator.
            non_blocking: Return before a device's copies are done.

        Raises:
            ConfigError: Another state or device.
            zero_partition.StateError: As for `zero_engine.offload_states`; or after `destroy`.
        """
        self._check_alive("offload_states()")
        self._apply_pending()
        offload_as_deepspeed(
            self.module, include, device, pin_memory=pin_memory, non_blocking=non_blocking
        )

    @collective
    def reload_states(self, non_blocking: bool = False) -> None:
        """Restore offloaded states; see `zero_engine.reload_states`. Every rank calls it."""
        self._check_alive("reload_states()")
        non_blocking = check_flag("Engine.reload_states()", non_blocking)
        reload_states(self.module, non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Release buffers as `zero_engine.release_buffers`, and empty torch's cache. Local."""
        self._check_alive("empty_partition_cache()")
        zero_partition.release_buffers(self.module)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def compile(  # type: ignore[override]
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module by `torch.compile`, in place. Local.

        At stage 3, compile its blocks instead (`block.compile()`), before or after `initialize`:
        hooks gather the units of the module.

        Args:
            backend: As of `torch.compile`.
            compile_kwargs: Other arguments of it.
            schedule: DeepCompile's, which is not built; must be None.
            compiled_autograd_enabled: Not built; must be False.

        Raises:
            ConfigError: The engine is at stage 3, or `schedule` or `compiled_autograd_enabled` is
                given.
        """
        self._check_alive("compile()")
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                "Engine.compile(): expected schedule=None and compiled_autograd_enabled=False, as "
                f"DeepCompile is not built, got {schedule!r} and {compiled_autograd_enabled!r}"
            )
        if self.config.zero.stage == 3:
            raise ConfigError(
                "Engine.compile(): expected stage 0, 1 or 2, got 3, where units of the module are "
                "gathered by hooks; compile blocks instead: for block in blocks: block.compile()"
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Return whether `compile` was called."""
        return self._is_compiled

    # ---- The end ----

    def destroy(self) -> None:
        """Drop gradients and release buffers. Local; a second call does nothing.

        The engine cannot be used any more. The model stays sharded, as no rank may have the memory
        for all of it: `zero_engine.unshard(engine.module, engine.optimizer)` makes it plain again.
        Counters and scheduler stay as after the last step. If its loss scale would have to get too
        small, that is no error any more.
        """
        if self._is_destroyed:
            return
        # The error asks for another scale, but nothing is scaled any more.
        with suppress(LossScaleError):
            self._apply_pending()
        self._is_destroyed = True
        if self._monitor is not None:
            self._monitor.close()
        self._waiting.close()
        if zero_partition.seams.find_sharded(self.module) is not None:
            self.zero_grad()
            zero_partition.release_buffers(self.module)

    def _note_dtypes(self, error: RuntimeError, inputs: Sequence[Any]) -> None:
        """Add a note to an error of forward if inputs have another dtype than the parameters."""
        params = (param.dtype for param in self.module.parameters())
        of_params = next((dtype for dtype in params if dtype.is_floating_point), None)
        tensors = (each for each in inputs if isinstance(each, Tensor))
        of_inputs = next((each.dtype for each in tensors if each.is_floating_point()), of_params)
        if of_params not in (None, of_inputs) and self.config.autocast_dtype is None:
            error.add_note(
                f"Inputs have {of_inputs} and parameters {of_params}: an engine does not cast "
                f"inputs, as DeepSpeed's does not. Pass inputs.to({of_params}), or use "
                "torch_autocast."
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.config.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    # ---- Micro-batches ----

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next `step` is at a boundary; None lets the engine count again. Local.

        Call it before backward, on every rank alike. The value stays until another is passed.

        Raises:
            ConfigError: `is_boundary` is neither a bool nor None; or the configuration says that
                every `step` is a boundary.
        """
        where = "Engine.set_gradient_accumulation_boundary()"
        if is_boundary is not None:
            check_flag(where, is_boundary)
        if not self.config.manages_accumulation:
            raise ConfigError(
                f"{where}: expected managed_gradient_accumulation, got {is_boundary} where it is "
                "false and every step() is a boundary; leave out step() instead"
            )
        self._is_boundary = is_boundary
        self._wait_or_not()

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip gradient reduction inside, at any stage; see `zero_engine.no_sync`. Local."""
        return self._without_steps("no_sync()", zero_partition.no_sync)

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduce gradients once, on leaving; see `zero_engine.coalesce_reduction`. Collective.

        Where the reduction waits for the boundary anyway (stages 0 and 1), it goes on waiting.
        """
        reduce = nullcontext if self._is_waiting() else zero_partition.coalesce_reduction
        return self._without_steps("coalesce_grad_reduction()", reduce)

    @contextmanager
    def _without_steps(
        self, what: str, context: Callable[[nn.Module], AbstractContextManager[Any]]
    ) -> Iterator[None]:
        self._check_alive(what)
        self._open_no_sync += 1
        try:
            with context(self.module):
                yield
        finally:
            self._open_no_sync -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that are still being reduced. Local."""
        target = self.module if self.optimizer is None else self.optimizer
        target.zero_grad(set_to_none=set_to_none)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches, right after a boundary, on every rank alike. Local.

        Raises:
            ConfigError: Not a whole multiple of the samples that all ranks have in a micro-batch.
            zero_partition.StateError: Gradients of some micro-batches are there.
        """
        each = self.train_micro_batch_size_per_gpu() * self._data.world_size
        where = "Engine.set_train_batch_size()"
        train_batch_size = check_number(where, train_batch_size, 1, int)
        if train_batch_size % each:
            raise ConfigError(
                f"{where}: expected a multiple of {each}, which is the "
                f"micro-batch size times the world size, got {train_batch_size}"
            )
        self._set_num_micro_batches(where, train_batch_size // each)

    def set_gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        """Set the number of micro-batches of a global step; `train_batch_size()` follows. Local.

        Right after a boundary, on every rank alike.

        Raises:
            ConfigError: No whole number of at least 1.
            zero_partition.StateError: Gradients of some micro-batches are there.
        """
        where = "Engine.set_gradient_accumulation_steps()"
        count = check_number(where, gradient_accumulation_steps, 1, int)
        self._set_num_micro_batches(where, count)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the number of samples of a rank in a micro-batch, on every rank alike. Local.

        The number of micro-batches stays, and `train_batch_size()` follows. Right after a boundary
        only. Batches do not change: the loader that `initialize` has made keeps the size that it
        was made with, as DeepSpeed's does, and other loaders are yours.

        Raises:
            ConfigError: No whole number of at least 1.
            zero_partition.StateError: Gradients of some micro-batches are there.
        """
        where = "Engine.set_train_micro_batch_size()"
        micro_batch_size = check_number(where, micro_batch_size, 1, int)
        self._check_at_boundary(where)
        self._micro_batch_size = micro_batch_size

    def _num_samples(self) -> int:
        """Return the samples of all ranks in the current global step.

        Where every step is a boundary, each backward so far counts as a micro-batch.
        """
        if self.config.manages_accumulation:
            return self.train_batch_size()
        return self._num_backwards * self._micro_batch_size * self._data.world_size

    def _begin_anew(self) -> None:
        """Forget micro-batches since the last boundary, and their gradients."""
        self.zero_grad()
        self._num_pending = self._num_backwards = 0
        self._was_applied = self._was_scaled = False
        if self._monitor is not None:
            self._monitor.forget()
        self._wait_or_not()

    def _watched(self, outputs: Any) -> Any:
        """Return outputs of `forward` with hooks for a direct backward; see NOTE(direct)."""
        if self.gradient_accumulation_steps() == 1 and not self.config.needs_scaled_loss:
            return outputs
        # Gradients of a transform are its caller's, and belong to no micro-batch.
        if is_in_functional_transform():
            return outputs
        entries = {id(tensor): tensor for tensor in _tensors_in(outputs) if tensor.grad_fn}
        if len(entries) > 1:
            entries = {key: tensor.view_as(tensor) for key, tensor in entries.items()}
            outputs = _replaced(outputs, entries)
        for tensor in entries.values():
            tensor.register_hook(self._enter)
        return outputs

    def _enter(self, grad: Tensor) -> Tensor | None:
        """Divide the gradient of an output, when a direct backward gets there; see NOTE(direct).

        Raises:
            StateError: The loss had to be scaled, and was not.
        """
        if self in self._running:
            return None
        if self.config.needs_scaled_loss and self._scaled_backward != current_backward():
            raise StateError(
                f"backward() of a loss that was not multiplied by the loss scale {self.cur_scale:g}"
                f" (rank {self.group.rank}); use engine.backward(loss), or "
                "engine.scale(loss).backward(); losses of several engines are scaled by their own "
                "before they are added up. Gradients of other models may be there: drop them"
            )
        count = 1 if self._running else self.gradient_accumulation_steps()
        return None if count == 1 else grad / count

    def _note_scaled(self, _: Tensor) -> None:
        """Note that the current backward passes through a loss that was scaled."""
        self._scaled_backward = current_backward()

    def _set_num_micro_batches(self, where: str, count: int) -> None:
        self._check_at_boundary(where)
        self._num_micro_batches = count
        self._wait_or_not()

    def _is_waiting(self) -> bool:
        return self.config.zero.stage < 2 and not self.is_gradient_accumulation_boundary()

    def _wait_or_not(self) -> None:
        """Enter `no_sync` for the next micro-batch, or leave it; see NOTE(boundary)."""
        self._waiting.close()
        if self._is_waiting():
            self._waiting.enter_context(zero_partition.no_sync(self.module))

    def _check_at_boundary(self, where: str) -> None:
        self._check_alive(where)
        if self._num_pending:
            raise StateError(
                f"{where}: expected to be called right after a boundary, but {self._num_pending} "
                f"micro-batches have been accumulated (rank {self.group.rank}); call it after the "
                "step() of a boundary"
            )

    def _check_alive(self, what: str) -> None:
        if self._is_destroyed:
            raise StateError(
                f"Engine: {what} after destroy(); to train on, zero_engine.unshard() the model and "
                "initialize() another engine"
            )

    # ---- Files ----

    @collective
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save as `zero_engine.save`, with scheduler, loss scale and counters. Collective.

        Gradients of micro-batches since the last boundary are not saved: there is a warning then,
        and `load_checkpoint` begins the global step anew.

        Args:
            save_dir: The folder of all checkpoints, which every rank sees.
            tag: The name of the checkpoint's folder; "global_step" and their number when None.
            client_state: What `load_checkpoint` returns; see `extra` of `zero_engine.save`.
            save_latest: Whether `load_checkpoint` finds it without its tag.
            exclude_frozen_parameters: Leave out parameters that do not train.

        Returns:
            True.

        Raises:
            ConfigError: `save_dir` is empty or None; or see `zero_engine.save`, as for all else
                that it raises.
        """
        self._check_alive("save_checkpoint()")
        self._apply_pending()
        if self._num_pending:
            warn_of_gradients()
        scaler = self.loss_scaler
        save_as(
            SaveRequest(
                model=self.module,
                optimizer=self.optimizer,
                folder=save_dir,
                tag=f"global_step{self.global_steps}" if tag is None else str(tag),
                step=self.global_steps,
                extra={} if client_state is None else client_state,
                scheduler=self._lr_scheduler if has_state(self._lr_scheduler) else None,
                exclude_frozen=check_flag("exclude_frozen_parameters", exclude_frozen_parameters),
                is_latest=check_flag("save_latest", save_latest),
                engine={
                    "counters": {name: getattr(self, name) for name in _COUNTERS},
                    "loss_scaler": None if scaler is None else scaler.state_dict(),
                },
            )
        )
        return True

    @collective
    def load_checkpoint(  # noqa: PLR0917 - the order is DeepSpeed's
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        missing_ok: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved, as `zero_engine.load`; drop gradients. Collective.

        A checkpoint of DeepSpeed's ZeRO is read as by `zero_engine.load_deepspeed`, with the
        counters and the scheduler; the loss scale and random numbers begin anew.

        Args:
            load_dir: The folder of all checkpoints.
            tag: The tag of one of them; the newest when None.
            load_module_strict: Whether names that are missing or unexpected are an error.
            load_optimizer_states: Whether moments, options of param groups and the loss scale are
                restored. Masters always are: they are the weights.
            load_lr_scheduler_states: Whether the scheduler is restored.
            load_module_only: Restore weights and buffers, and no counters or generators either.
            custom_load_fn: Not supported; must be None.
            missing_ok: False makes it an error that there is no checkpoint yet, or no folder; else
                that is a warning, as in DeepSpeed, and the script trains from scratch.

        Returns:
            The path of the checkpoint and the `client_state`; None twice where there is none yet.

        Raises:
            ConfigError: `load_dir` is no path, or `custom_load_fn` is given; or the loss scale does
                not fit.
            FileError: See `zero_engine.load`, as for all else that it raises.
        """
        self._check_alive("load_checkpoint()")
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(): expected custom_load_fn to be None: names and shapes are "
                "matched by zero_engine.load; rename keys with zero_engine.load_pretrained()"
            )
        check_folder("load_checkpoint()", load_dir)
        self._apply_pending()
        has_all, folder = not load_module_only, Path(load_dir)
        optimizer = self.optimizer if has_all and load_optimizer_states else None
        has_scheduler = has_all and load_lr_scheduler_states and has_state(self._lr_scheduler)
        scheduler = self._lr_scheduler if has_scheduler else None
        tag = None if tag is None else str(tag)
        reader = self.config.reader or find_reader()
        theirs = run_on_all_ranks(
            lambda: reader is not None and _is_theirs(reader, folder, tag),
            what="load_checkpoint()",
            group=self.group,
            timeout_s=_TIMEOUT_S,
        )
        if reader is not None and any(theirs):
            found = reader.load_checkpoint(
                folder, self.module, optimizer, tag=tag, is_strict=load_module_strict, group=None
            )
            self._begin_anew()
            if has_all:
                self._take_up(found, scheduler)
            return str(found.path), dict(found.client_state)
        report = load(
            folder,
            self.module,
            optimizer,
            scheduler=scheduler,
            tag=tag,
            is_strict=load_module_strict,
            restores_rngs=has_all,
            missing_ok=missing_ok,
        )
        if report is None:
            lacks = "contains no complete checkpoint" if folder.exists() else "no such folder"
            warn_user(f"{folder.absolute()}: {lacks}; the training begins anew")
            return None, None
        for what in report.begins_anew:
            warn_user(f"{report.path}: begins anew: {what}")
        self._begin_anew()
        if has_all:
            saved = report.engine or {"counters": {"global_steps": report.step}}
            for name, value in saved["counters"].items():
                if name in _COUNTERS:
                    setattr(self, name, value)
            if load_optimizer_states and self._loss_scaler is not None and saved.get("loss_scaler"):
                self._loss_scaler.load_state_dict(saved["loss_scaler"])
        return str(report.path), report.extra

    def _take_up(self, found: Any, scheduler: Any) -> None:
        """Restore counters and the scheduler of DeepSpeed's engine. Local."""
        said = found.engine
        self.global_steps = found.step
        self.micro_steps = found.step * self.gradient_accumulation_steps()
        self.global_samples = said.get("global_samples", found.step * self.train_batch_size())
        self._skipped_steps = said.get("skipped_steps", 0)
        anew = ["the loss scale"] if self.loss_scale() == 0.0 else []
        if scheduler is not None and said.get("lr_scheduler") is None:
            anew.append("the scheduler, which was saved without state")
        elif scheduler is not None:
            scheduler.load_state_dict(said["lr_scheduler"])
            rates = scheduler.get_last_lr() if hasattr(scheduler, "get_last_lr") else ()
            for options, rate in zip(self._groups(), rates, strict=False):
                options["lr"] = rate
        if anew:
            warn_user(f"{found.path}: begins anew: {', '.join(anew)}")

    @collective
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights alone, in the dtype that the model computes with. Collective.

        Rank 0 needs host memory for all of them.

        Args:
            save_dir: The folder to write to; made if need be.
            save_filename: A name that ends in ".safetensors" gives such a file, in which tied
                parameters are under the first of their names; else `torch.save` writes it.
            exclude_frozen_parameters: Leave out parameters that do not train.

        Returns:
            True.

        Raises:
            FileError: It could not be written; a file that was there before is unchanged.
        """
        self._check_alive("save_16bit_model()")
        state = zero_partition.full_state_dict(self.module)
        path = Path(save_dir) / save_filename
        left_out = set()
        if exclude_frozen_parameters:
            named_params = self.module.named_parameters(remove_duplicate=False)
            left_out = {name for name, param in named_params if not param.requires_grad}
        chosen = {name: value for name, value in state.items() if name not in left_out}

        def write() -> None:
            if self.group.rank == 0:
                write_weights(chosen, path)

        run_on_all_ranks(write, what="save_16bit_model()", group=self.group)
        return True

    save_fp16_model = save_16bit_model

    # ---- Facts, all of them local ----

    @property
    def lr_scheduler(self) -> Any:
        """Scheduler, which advances only where the optimizer has stepped; None if there is none."""
        self._apply_pending()
        return self._lr_scheduler

    @property
    def loss_scaler(self) -> LossScaler | None:
        """Loss scaler; None where losses are not scaled."""
        self._apply_pending()
        return self._loss_scaler

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped, as a gradient on any rank was inf or nan."""
        self._apply_pending()
        return self._skipped_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` lets the optimizer step."""
        if self._is_boundary is not None:
            return self._is_boundary
        return self._num_pending + 1 >= self._num_micro_batches

    def was_step_applied(self) -> bool:
        """Return whether the last `step` changed weights: False off a boundary, and if skipped."""
        self._apply_pending()
        return self._was_applied

    def was_step_skipped(self) -> bool:
        """Return whether the last `step` at a boundary was skipped for a gradient of inf or nan."""
        self._apply_pending()
        return self._was_skipped

    def get_global_grad_norm(self) -> float | None:
        """Return the gradients' norm over all ranks at the last boundary. Waits for it.

        It is the norm before clipping, also if inf or nan. None before the first boundary.
        """
        return None if self._norm is None else self._norm.item()

    @property
    def cur_scale(self) -> float:
        """Factor by which losses are multiplied now; 1 where they are not scaled."""
        scaler = self.loss_scaler
        return 1.0 if scaler is None else scaler.scale

    def loss_scale(self) -> float:
        """Return the configured loss scale: 0 where it is dynamic, 1 where nothing is scaled."""
        chosen = self.config.loss_scale
        if chosen is None:
            return 1.0
        return chosen.scale if isinstance(chosen, StaticLossScale) else 0.0

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each param group."""
        self._apply_pending()
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return the betas, or else the momentum, of each param group; 0.0 if it has neither."""
        self._apply_pending()
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """Return the option "type" of each param group; 0.0 where it has none."""
        return self._of_groups("type")

    def train_batch_size(self) -> int:
        """Samples of one global step, over all ranks."""
        return self._micro_batch_size * self._data.world_size * self._num_micro_batches

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in one micro-batch."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one global step."""
        return self._num_micro_batches

    def managed_gradient_accumulation(self) -> bool:
        """Return whether the engine counts micro-batches; otherwise every `step` is a boundary."""
        return self.config.manages_accumulation

    def gradient_clipping(self) -> float:
        """Return the norm to which gradients are clipped; 0 where they are not."""
        return self.config.max_norm

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return int(self.config.zero.stage)

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded: whether the stage is above 0."""
        return self.config.zero.stage > 0

    def fp16_enabled(self) -> bool:
        """Return whether the configured dtype of parameters is fp16."""
        return self._params_dtype() is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return whether the configured dtype of parameters is bf16."""
        return self._params_dtype() is torch.bfloat16

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.group.device

    @property
    def world_size(self) -> int:
        """Ranks of the engine's group."""
        return self.group.world_size

    @property
    def global_rank(self) -> int:
        """Rank in the whole job."""
        group = self.group
        return 0 if group.process_group is None else group.global_rank(group.rank)

    @property
    def local_rank(self) -> int:
        """Position among the job's ranks on this host, as torchrun says."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # `__init__` is running, and has not set it yet.
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            owners = f"{type(self).__name__} nor the {type(self.module).__name__} in it"
            message = f"neither the {owners} has an attribute {name!r}"
            raise AttributeError(message, name=name, obj=self) from error

    def _apply_pending(self) -> None:
        """Wait for the outcome of the last step, if pending, and apply it; NOTE(verdict). Local."""
        if self._verdict is not None:
            verdict, self._verdict = self._verdict, None
            self._learn(verdict.resolve())

    def _learn(self, was_applied: bool) -> None:
        self._was_applied, self._was_skipped = was_applied, not was_applied
        self._skipped_steps += not was_applied
        self._tell()
        if self._loss_scaler is not None:
            # Comes last, since it may raise.
            self._loss_scaler.update(not was_applied)

    def _tell(self) -> None:
        """Print a line on rank 0, once in `steps_per_print` global steps."""
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.group.rank == 0:
            print(
                f"step={self.global_steps}, skipped={self._skipped_steps}, lr={self.get_lr()}, "
                f"mom={self.get_mom()}",
                flush=True,
            )

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key, 0.0) for group in self._groups()]

    def _params_dtype(self) -> torch.dtype | None:
        precision = self.config.zero.precision
        return None if precision is None else precision.params


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists and dictionaries, where DeepSpeed looks for them, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _replaced(value: Any, by_id: Mapping[int, Tensor]) -> Any:
    """Return a value with tensors replaced; lists and dictionaries are changed in place."""
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if not isinstance(value, tuple | list | dict):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    changed = {key: new for key, item in items if (new := _replaced(item, by_id)) is not item}
    if changed and isinstance(value, tuple):
        content = [changed.get(index, item) for index, item in enumerate(value)]
        return type(value)(*content) if hasattr(value, "_fields") else type(value)(content)
    if isinstance(value, list | dict):
        for key, new in changed.items():
            value[key] = new
    return value


def _is_theirs(reader: AbstractReader, folder: Path, tag: str | None) -> bool:
    """Return whether folder and tag are of another library's checkpoint, not of one of ours."""
    if complete := find_complete(folder):
        return tag not in complete and reader.is_checkpoint(folder, tag)
    return reader.has_checkpoint(folder, tag)


def _check_step(scheduler: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `scheduler.step(**given)` can be called: some need a metric."""
    try:
        signature(scheduler.step).bind(**given)
    except TypeError as error:
        name = type(scheduler).__name__
        raise ConfigError(
            f"Engine.step(): expected lr_kwargs to be what {name}.step() takes, got "
            f"{dict(given)!r}: {error}; as in engine.step(lr_kwargs={{'metrics': loss}}) for "
            "ReduceLROnPlateau; nothing was done"
        ) from error
