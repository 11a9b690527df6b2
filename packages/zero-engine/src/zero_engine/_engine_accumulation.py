"""How micro-batches add up to a step of the optimizer, and when their gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import zero_partition
from torch import nn
from zero_comm import Group
from zero_partition import StateError

from ._checks import check_flag, check_whole
from ._engine_config import EngineConfig
from ._engine_facts import EngineFacts
from ._errors import ConfigError

# NOTE(boundary): a micro-batch ends with step(). Where the stage keeps whole gradients anyway (0
# and 1), the engine is inside no_sync from one step() on until the micro-batch at whose end the
# optimizer steps: so it does not matter who calls backward, and on what.


class EngineAccumulation(EngineFacts):
    """The micro-batches of an engine, and whether it may be used still."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: EngineConfig,
        *,
        group: Group,
        lr_scheduler: Any,
    ) -> None:
        super().__init__(module, optimizer, config, group=group, lr_scheduler=lr_scheduler)
        self._was_scaled = self._is_destroyed = False
        self._open_no_sync = 0  # the user's
        self._waiting = ExitStack()  # see NOTE(boundary)
        self._wait_or_not()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide it by hand, before backward, on every rank alike, until None is passed. Local.

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
        self._accumulation.chosen = is_boundary
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

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches, right after a boundary, on every rank alike. Local.

        Raises:
            ConfigError: Not a whole multiple of the samples that all ranks have in a micro-batch.
            zero_partition.StateError: Gradients of some micro-batches are there.
        """
        each = self.train_micro_batch_size_per_gpu() * self.group.world_size
        where = "Engine.set_train_batch_size()"
        train_batch_size = check_whole(where, train_batch_size, minimum=1)
        if train_batch_size % each:
            raise ConfigError(
                f"{where}: expected a multiple of {each}, which is the "
                f"micro-batch size times the world size, got {train_batch_size}"
            )
        self._set_num_micro_batches(where, train_batch_size // each)

    def set_gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        """The same by the number of micro-batches itself: `train_batch_size()` follows. Local.

        Raises:
            ConfigError: No whole number of at least 1.
            zero_partition.StateError: Gradients of some micro-batches are there.
        """
        where = "Engine.set_gradient_accumulation_steps()"
        count = check_whole(where, gradient_accumulation_steps, minimum=1)
        self._set_num_micro_batches(where, count)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Tell how many samples a rank has in a micro-batch, on every rank alike. Local.

        The number of micro-batches stays, and `train_batch_size()` follows. Right after a boundary
        only. What is trained does not change by it: the loader that `initialize` has made goes on
        with batches of the size that it was made with, as DeepSpeed's does, and others are yours.

        Raises:
            ConfigError: No whole number of at least 1.
            zero_partition.StateError: Gradients of some micro-batches are there.
        """
        where = "Engine.set_train_micro_batch_size()"
        micro_batch_size = check_whole(where, micro_batch_size, minimum=1)
        self._check_at_boundary(where)
        self._micro_batch_size = micro_batch_size

    def _begin_anew(self) -> None:
        """Forget micro-batches since the last boundary, and their gradients."""
        self.zero_grad()
        self._accumulation.num_pending = 0
        self._was_applied = self._was_scaled = False
        self._wait_or_not()

    def _set_num_micro_batches(self, where: str, count: int) -> None:
        self._check_at_boundary(where)
        self._accumulation.num_micro_batches = count
        self._wait_or_not()

    def _is_waiting(self) -> bool:
        return self.config.zero.stage < 2 and not self.is_gradient_accumulation_boundary()

    def _wait_or_not(self) -> None:
        """See NOTE(boundary)."""
        self._waiting.close()
        if self._is_waiting():
            self._waiting.enter_context(zero_partition.no_sync(self.module))

    def _check_at_boundary(self, where: str) -> None:
        self._check_alive(where)
        pending = self._accumulation.num_pending
        if pending:
            raise StateError(
                f"{where}: expected to be called right after a boundary, but "
                f"{pending} micro-batches have been accumulated (rank {self.group.rank}); call it "
                "after the step() of a boundary"
            )

    def _check_alive(self, what: str) -> None:
        if self._is_destroyed:
            raise StateError(
                f"Engine: {what} after destroy(); to train on, zero_engine.unshard() the model and "
                "initialize() another engine"
            )
