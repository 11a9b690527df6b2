"""Engine: the training loop of DeepSpeed's shape, over what shard() has made."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, final

import torch
import zero_partition
from torch import Tensor, nn
from zero_comm import Group, collective
from zero_partition import StateError

from ._checks import check_flag
from ._engine_config import EngineConfig
from ._engine_files import EngineFiles
from ._errors import ConfigError, LossScaleError
from ._parking import offload_as_deepspeed, reload_states
from ._schedulers import check_step
from ._verdict import Verdict, can_undo, remember

# NOTE(scale): a loss is multiplied by the loss scale in fp32: in fp16 the product would overflow.


@final
class Engine(EngineFiles):
    """A sharded model with its optimizer and scheduler; made by `initialize`.

        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    Call all three once per micro-batch; `step` does something at a boundary only, once in
    `gradient_accumulation_steps()`. Attributes that it lacks are looked for in the model. Names of
    parameters begin with "module.", as in DeepSpeed; those of `engine.module` are the model's own.

    `loss.backward()` works as well: for losses of several engines added up, or gradients given by
    hand. Gradients are divided by the number of micro-batches then where they enter what the engine
    returned, as in DeepSpeed; not those of `engine.module(batch)`. Where the loss is scaled (fp16),
    call backward of `engine.scale(loss)` instead: with a scale that changes by itself a
    `loss.backward()` raises; with a static one nobody can tell, and `step` warns.

    Attributes:
        module: The model, as `shard` left it.
        optimizer: The torch optimizer, over shards; None for inference.
        global_steps: Boundaries so far, those of skipped steps included.
        micro_steps: Calls of `step` so far.
        global_samples: Samples of all ranks in those global steps; where every step is a boundary,
            of as many micro-batches as there were calls of `backward`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: EngineConfig,
        *,
        group: Group,
        lr_scheduler: Any = None,
        across: Group | None = None,
    ) -> None:
        super().__init__(module, optimizer, config, group=group, lr_scheduler=lr_scheduler)
        self._across = across
        self._is_late = self.device.type != "cpu"  # see NOTE(verdict)

    # ---- The loop ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; under the autocast of the configuration, where it has one."""
        self._check_alive("forward")
        with self._autocast():
            outputs = self.module(*args, **kwargs)
        return self._watched(outputs)

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
            gradient: Of the loss's shape: what `loss.backward(gradient)` is given.

        Returns:
            The loss divided as it was, not scaled.

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
        self._num_backwards += 1
        self._running.append(self)
        try:
            self.scale(loss).backward(gradient, retain_graph=retain_graph)
        finally:
            self._running.remove(self)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply by the loss scale: for a backward that the engine does not run. Local."""
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

        On CUDA a fused optimizer skips on the device, and the host learns of it in the next `step`,
        or when it asks: `was_step_applied()`, `cur_scale`, `get_lr()`, `lr_scheduler` wait. Until
        then a scheduler held outside the engine is a step ahead after a skipped one.

        Args:
            lr_kwargs: What `lr_scheduler.step` is given.

        Raises:
            ConfigError: The engine has no optimizer, or `lr_scheduler.step` takes something else;
                nothing was done.
            LossScaleError: As the loss scale is configured: it would have to get too small.
            zero_partition.StateError: Inside `no_sync` or `coalesce_grad_reduction`, or after
                `destroy`; nothing was done.
        """
        self._check_alive("step()")
        self._settle()
        if self._open_no_sync:
            raise StateError(
                "Engine.step() inside no_sync() or coalesce_grad_reduction(): gradients were not "
                f"reduced yet (rank {self.group.rank}); leave the context first"
            )
        if self.cur_scale != 1.0 and not self._was_scaled and self.group.rank == 0:
            warnings.warn(
                f"Engine.step(): gradients are divided by the loss scale {self.cur_scale:g}, but "
                "the engine multiplied no loss by it; unless you did, use engine.backward(loss), "
                "or engine.scale(loss).backward()",
                stacklevel=2,
            )
        is_boundary, optimizer = self.is_gradient_accumulation_boundary(), self.optimizer
        if is_boundary and optimizer is None:
            raise ConfigError(
                "Engine.step(): the engine has no optimizer; pass one to initialize()"
            )
        if is_boundary and self._lr_scheduler is not None:
            check_step(self._lr_scheduler, lr_kwargs or {})
        self._was_applied = self._was_scaled = False
        if is_boundary and optimizer is not None:
            self._take_step(optimizer, lr_kwargs or {})
        self.micro_steps += 1
        self._accumulation.end_micro_batch()
        self._wait_or_not()

    def _take_step(self, optimizer: torch.optim.Optimizer, lr_kwargs: dict[str, Any]) -> None:
        checks = self.config.checks_overflow or self._loss_scaler is not None
        report = zero_partition.unscale_and_clip_(
            self.module,
            scale=self.cur_scale,
            max_norm=self.config.max_norm or None,
            across=self._across,
            in_step=checks and can_undo(self._lr_scheduler),
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
            self._verdict = Verdict.of(report.finite, self._loss_scaler, undo)
        if may_apply and self._lr_scheduler is not None:
            self._lr_scheduler.step(**lr_kwargs)
        if not is_late:
            self._learn(may_apply)

    # ---- Between phases ----

    @collective
    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """As `zero_engine.offload_states`, with DeepSpeed's names. Collective.

        Args:
            include: Of "lp_params", "hp_params" (masters), "lp_grads", "optim_states" and
                "contiguous_grad_buffer", or enumeration members of those values; all when None.
            device: "cpu", or an enumeration member of that value.
            pin_memory: Page-lock host memory, where there is CUDA.
            non_blocking: Return before a device's copies are done.

        Raises:
            ConfigError: Another state or device.
            zero_partition.StateError: As for `zero_engine.offload_states`; or after `destroy`.
        """
        self._check_alive("offload_states()")
        self._settle()
        offload_as_deepspeed(
            self.module, include, device, pin_memory=pin_memory, non_blocking=non_blocking
        )

    @collective
    def reload_states(self, non_blocking: bool = False) -> None:
        """As `zero_engine.reload_states`. Every rank calls it."""
        self._check_alive("reload_states()")
        non_blocking = check_flag("Engine.reload_states()", non_blocking)
        reload_states(self.module, non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """As `zero_engine.release_buffers`, and the device gets back what torch caches. Local."""
        self._check_alive("empty_partition_cache()")
        zero_partition.release_buffers(self.module)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    # ---- The end ----

    def destroy(self) -> None:
        """Drop gradients and give buffers back. Local; twice is as good as once.

        The engine cannot be used any more. The model stays sharded, as no rank may have the memory
        for all of it: `zero_engine.unshard(engine.module, engine.optimizer)` makes it plain again.
        Counters and scheduler are as of the last step; that its loss scale would have to get too
        small is no error any more.
        """
        if self._is_destroyed:
            return
        with suppress(LossScaleError):  # it asks for another scale, and nothing is scaled any more
            self._settle()
        self._is_destroyed = True
        self._waiting.close()
        if zero_partition.find_sharded(self.module) is not None:
            self.zero_grad()
            zero_partition.release_buffers(self.module)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.config.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)
