"""What an engine can be asked: counters, sizes, rates, ranks. All of it is local."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from zero_comm import Group

from ._accumulation import Accumulation
from ._engine_config import EngineConfig
from ._loss_scale import LossScaler, StaticLossScale
from ._verdict import Verdict


class EngineFacts(nn.Module):
    """The state of an engine, for reading. `Engine` documents its attributes."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: EngineConfig,
        *,
        group: Group,
        lr_scheduler: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self.config = config
        self.group = group
        scale = config.loss_scale
        self._loss_scaler = None if scale is None else LossScaler(scale)
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._skipped_steps = 0
        self._accumulation = Accumulation(
            config.accumulation_steps, chosen=None if config.manages_accumulation else True
        )
        self._micro_batch_size = config.micro_batch_size
        self._norm: Tensor | None = None
        self._was_applied = False
        self._verdict: Verdict | None = None  # of the last step; None if it is known

    @property
    def lr_scheduler(self) -> Any:
        """Whatever has `step()`; advanced where the optimizer has stepped, only."""
        self._settle()
        return self._lr_scheduler

    @property
    def loss_scaler(self) -> LossScaler | None:
        """None where losses are not scaled."""
        self._settle()
        return self._loss_scaler

    @property
    def skipped_steps(self) -> int:
        """Those at which a gradient on any rank was inf or nan."""
        self._settle()
        return self._skipped_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` lets the optimizer step."""
        return self._accumulation.is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights: False off a boundary, and where skipped."""
        self._settle()
        return self._was_applied

    def get_global_grad_norm(self) -> float | None:
        """Over all ranks at the last boundary, before clipping; inf or nan as it was. Waits for it.

        None before the first boundary.
        """
        return None if self._norm is None else self._norm.item()

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied by now."""
        scaler = self.loss_scaler
        return 1.0 if scaler is None else scaler.scale

    def loss_scale(self) -> float:
        """As configured: 0 where it is dynamic, 1 where nothing is scaled."""
        chosen = self.config.loss_scale
        if chosen is None:
            return 1.0
        return chosen.scale if isinstance(chosen, StaticLossScale) else 0.0

    def get_lr(self) -> list[Any]:
        """The learning rate of each param group."""
        self._settle()
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The betas, or else the momentum, of each param group; 0.0 where there is neither."""
        self._settle()
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """What each param group says as its "type"; 0.0 where it says nothing."""
        return self._of_groups("type")

    def train_batch_size(self) -> int:
        """Samples of one global step, over all ranks."""
        micro_batch = self._micro_batch_size * self.group.world_size
        return micro_batch * self._accumulation.num_micro_batches

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in one micro-batch."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one global step."""
        return self._accumulation.num_micro_batches

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; every `step` is a boundary otherwise."""
        return self.config.manages_accumulation

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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not yet there: __init__ is running
                raise
        return getattr(self.module, name)

    def _settle(self) -> None:
        """Have the last step's outcome, which on CUDA may be waited for. Local."""
        if self._verdict is not None:
            verdict, self._verdict = self._verdict, None
            self._learn(verdict.settle())

    def _learn(self, was_applied: bool) -> None:
        self._was_applied = was_applied
        self._skipped_steps += not was_applied
        self._tell()
        if self._loss_scaler is not None:
            self._loss_scaler.update(not was_applied)  # may raise: last

    def _tell(self) -> None:
        """The line that `steps_per_print` asks for."""
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
