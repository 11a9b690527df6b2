"""Engine: the training loop of DeepSpeed's shape, over what shard() has made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, final

import torch
import zero_partition
from torch import Tensor, nn
from zero_comm import Group
from zero_partition import StateError

from ._engine_config import EngineConfig
from ._errors import ConfigError
from ._loss_scale import LossScaler, StaticLossScale

# NOTE(boundary): a micro-batch ends with step(). Where the stage keeps whole gradients anyway (0
# and 1), the engine is inside no_sync from one step() on until the micro-batch at whose end the
# optimizer steps: so it does not matter who calls backward, and on what.

# NOTE(scale): a loss is multiplied by the loss scale in fp32: in fp16 the product would overflow.

_LATER: Final = {
    "save_checkpoint": "zero_engine.full_state_dict(engine.module) gives the weights",
    "load_checkpoint": "load weights before initialize(), or by zero_engine.load_pretrained()",
    "save_16bit_model": "zero_engine.full_state_dict(engine.module) gives the weights",
    "save_fp16_model": "zero_engine.full_state_dict(engine.module) gives the weights",
    "offload_states": "states stay on their device",
    "reload_states": "states stay on their device",
}


@final
class Engine(nn.Module):
    """A sharded model with its optimizer and scheduler; made by `initialize`.

        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    Call all three once per micro-batch; `step` does something at a boundary only, once in
    `gradient_accumulation_steps()`. Attributes that it lacks are looked for in the model. Names of
    parameters begin with "module.", as in DeepSpeed; those of `engine.module` are the model's own.

    `loss.backward()` works as well: for losses of several engines added up, or gradients given by
    hand. Nobody divides by the number of micro-batches then, and where gradients are scaled (fp16),
    pass `engine.scale(loss)` through instead of the loss: `step` raises if nothing was.

    Attributes:
        module: The model, as `shard` left it.
        optimizer: The torch optimizer, over shards; None for inference.
        lr_scheduler: Whatever has `step()`; advanced where the optimizer has stepped, only.
        loss_scaler: None where losses are not scaled.
        global_steps: Boundaries so far, those of skipped steps included.
        skipped_steps: Those at which a gradient on any rank was inf or nan.
        micro_steps: Calls of `step` so far.
        global_samples: Samples of all ranks in those global steps.
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
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.config = config
        self.group = group
        self.across = across
        scale = config.loss_scale
        self.loss_scaler = None if scale is None else LossScaler(scale)
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self._accumulation_steps = config.accumulation_steps
        self._micro_batch_size = config.micro_batch_size
        self._accumulated = 0  # micro-batches since the last boundary
        self._chosen_boundary: bool | None = None
        self._norm: Tensor | None = None
        self._was_applied = self._was_scaled = self._is_destroyed = False
        self._open_no_sync = 0  # the user's
        self._waiting = ExitStack()  # see NOTE(boundary)
        self._wait_or_not()

    # ---- The loop ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; under the autocast of the configuration, where it has one."""
        self._check_alive("forward")
        with self._autocast():
            return self.module(*args, **kwargs)

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
            ConfigError: `loss` is no tensor.
            zero_partition.StateError: The engine was destroyed.
        """
        self._check_alive("backward()")
        if not isinstance(loss, Tensor):
            raise ConfigError(f"Engine.backward(): expected a tensor, got {loss!r}")
        if scale_wrt_gas and self._accumulation_steps > 1:
            loss = loss / self._accumulation_steps
        self.scale(loss).backward(gradient, retain_graph=retain_graph)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply by the loss scale: for a backward that the engine does not run. Local."""
        self._was_scaled = True
        return loss if self.cur_scale == 1.0 else loss.float() * self.cur_scale

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch. At a boundary: unscale, clip, step, advance the scheduler. Collective.

        Gradients are dropped then. Where a gradient on any rank is inf or nan, no rank steps:
        weights, optimizer and scheduler stay as they are, and `was_step_applied()` is False. An
        engine that neither scales losses nor `checks_overflow` steps all the same, as plain torch.

        Args:
            lr_kwargs: What `lr_scheduler.step` is given.

        Raises:
            zero_partition.StateError: Inside `no_sync` or `coalesce_grad_reduction`, after
                `destroy`, without an optimizer, or nothing was scaled though gradients have to be;
                nothing was done.
        """
        self._check_alive("step()")
        if self._open_no_sync:
            raise StateError(
                "Engine.step() inside no_sync() or coalesce_grad_reduction(): gradients were not "
                f"reduced yet (rank {self.group.rank}); leave the context first"
            )
        if self.cur_scale != 1.0 and not self._was_scaled:
            raise StateError(
                f"Engine.step(): gradients would be divided by the loss scale {self.cur_scale:g}, "
                f"but no loss was multiplied by it (rank {self.group.rank}); "
                "use engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._was_applied = self._was_scaled = False
        self.micro_steps += 1
        if self.is_gradient_accumulation_boundary():
            self._take_step(lr_kwargs or {})
            self._accumulated = 0
        else:
            self._accumulated += 1
        self._wait_or_not()

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer = self.optimizer
        if optimizer is None:
            raise ConfigError("Engine.step(): the engine has no optimizer; pass one to initialize()")
        report = zero_partition.unscale_and_clip_(
            self.module,
            scale=self.cur_scale,
            max_norm=self.config.max_norm or None,
            across=self.across,
        )
        self._norm = report.norm
        checks = self.config.checks_overflow or self.loss_scaler is not None
        self._was_applied = report.is_finite or not checks
        if self._was_applied:
            optimizer.step()
        optimizer.zero_grad()
        if self.loss_scaler is not None:
            self.loss_scaler.update(not self._was_applied)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.skipped_steps += not self._was_applied
        if self._was_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._tell()

    # ---- Accumulation ----

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` lets the optimizer step. Local."""
        if self._chosen_boundary is not None:
            return self._chosen_boundary
        return self._accumulated + 1 >= self._accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide it by hand, before backward, on every rank alike, until None is passed. Local."""
        self._chosen_boundary = is_boundary
        self._wait_or_not()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As `zero_engine.no_sync`, at any stage: backwards inside reduce nothing. Local."""
        self._check_alive("no_sync()")
        self._open_no_sync += 1
        try:
            with zero_partition.no_sync(self.module):
                yield
        finally:
            self._open_no_sync -= 1

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As `zero_engine.coalesce_reduction`: several backwards, one reduction on leaving.

        Where the reduction waits for the boundary anyway (stages 0 and 1), it goes on waiting.
        """
        self._check_alive("coalesce_grad_reduction()")
        self._open_no_sync += 1
        try:
            if self._is_waiting():
                yield
            else:
                with zero_partition.coalesce_reduction(self.module):
                    yield
        finally:
            self._open_no_sync -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those on their way too. Local."""
        target = self.module if self.optimizer is None else self.optimizer
        target.zero_grad(set_to_none=set_to_none)

    def _is_waiting(self) -> bool:
        return self.config.zero.stage < 2 and not self.is_gradient_accumulation_boundary()

    def _wait_or_not(self) -> None:
        """See NOTE(boundary)."""
        self._waiting.close()
        if self._is_waiting():
            self._waiting.enter_context(zero_partition.no_sync(self.module))

    # ---- What it knows ----

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights: False off a boundary, and where skipped."""
        return self._was_applied

    def get_global_grad_norm(self) -> float | None:
        """Over all ranks at the last boundary, before clipping; inf or nan as it was. Waits for it.

        None before the first boundary.
        """
        return None if self._norm is None else self._norm.item()

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied by now."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def loss_scale(self) -> float:
        """As configured: 0 where it is dynamic, 1 where nothing is scaled."""
        chosen = self.config.loss_scale
        if chosen is None:
            return 1.0
        return chosen.scale if isinstance(chosen, StaticLossScale) else 0.0

    def get_lr(self) -> list[Any]:
        """The learning rate of each param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The betas, or else the momentum, of each param group; 0.0 where there is neither."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """What each param group says as its "type"; 0.0 where it says nothing."""
        return self._of_groups("type")

    def train_batch_size(self) -> int:
        """Samples of one global step, over all ranks."""
        return self._micro_batch_size * self._accumulation_steps * self.group.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in one micro-batch."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one global step."""
        return self._accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches, right after a boundary, on every rank alike. Local.

        Raises:
            ConfigError: No multiple of the samples that all ranks have in one micro-batch.
            zero_partition.StateError: Gradients of some micro-batches are there.
        """
        each = self._micro_batch_size * self.group.world_size
        if train_batch_size < each or train_batch_size % each:
            raise ConfigError(
                f"Engine.set_train_batch_size(): expected a multiple of {each}, which is the "
                f"micro-batch size times the world size, got {train_batch_size}"
            )
        if self._accumulated:
            raise StateError(
                "Engine.set_train_batch_size(): expected to be called right after a boundary, but "
                f"{self._accumulated} micro-batches have been accumulated"
            )
        self._accumulation_steps = train_batch_size // each
        self._wait_or_not()

    def gradient_clipping(self) -> float:
        """The largest norm; 0 where nothing is clipped."""
        return self.config.max_norm

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return int(self.config.zero.stage)

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.config.zero.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether parameters are in fp16."""
        return self._params_dtype() is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are in bf16."""
        return self._params_dtype() is torch.bfloat16

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.group.device

    @property
    def world_size(self) -> int:
        """Ranks of the engine's group."""
        return self.group.world_size

    @property
    def global_rank(self) -> int:
        """Position in the whole job."""
        group = self.group
        return 0 if group.process_group is None else group.global_rank(group.rank)

    @property
    def local_rank(self) -> int:
        """Position among the job's ranks on this host, as torchrun says."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    # ---- The end ----

    def destroy(self) -> None:
        """Drop gradients and give buffers back. Local; twice is as good as once.

        The engine cannot be used any more. The model stays sharded, as no rank may have the memory
        for all of it: `zero_engine.unshard(engine.module, engine.optimizer)` makes it plain again.
        """
        if self._is_destroyed:
            return
        self._is_destroyed = True
        self._waiting.close()
        if zero_partition.find_sharded(self.module) is not None:
            self.zero_grad()
            zero_partition.release_buffers(self.module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not yet there: __init__ is running
                raise
        if name in _LATER and not hasattr(self.module, name):
            raise AttributeError(f"Engine.{name} is not built yet; meanwhile: {_LATER[name]}")
        return getattr(self.module, name)

    def _check_alive(self, what: str) -> None:
        if self._is_destroyed:
            raise StateError(
                f"Engine: {what} after destroy(); to train on, zero_engine.unshard() the model and "
                "initialize() another engine"
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.config.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key, 0.0) for group in self._groups()]

    def _params_dtype(self) -> torch.dtype | None:
        precision = self.config.zero.precision
        return None if precision is None else precision.params

    def _tell(self) -> None:
        """The line that `steps_per_print` asks for."""
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.group.rank == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
                f"mom={self.get_mom()}",
                flush=True,
            )
