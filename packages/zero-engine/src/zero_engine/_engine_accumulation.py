"""How micro-batches add up to a step of the optimizer, and when their gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
import zero_partition
from torch import Tensor, nn
from zero_comm import Group
from zero_partition import StateError

from ._checks import check_flag, check_whole
from ._engine_config import EngineConfig
from ._engine_facts import EngineFacts
from ._errors import ConfigError
from ._torch_compat import current_backward

# NOTE(boundary): a micro-batch ends with step(). Where the stage keeps whole gradients anyway (0
# and 1), the engine is inside no_sync from one step() on until the micro-batch at whose end the
# optimizer steps: so it does not matter who calls backward, and on what.

# NOTE(direct): in a backward that no engine runs, gradients are divided by the number of
# micro-batches where they enter the model, at what `forward` returned. An output may be computed
# from another one, as a loss is from logits: where there are several, the user gets views of them,
# through which only gradients from outside pass, so that nothing is divided twice.


class EngineAccumulation(EngineFacts):
    """The micro-batches of an engine, and whether it may be used still."""

    _running: ClassVar[list[EngineAccumulation]] = []  # in backward(); a loss may be of several

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
        self._scaled_backward = -1  # the last one to pass through a loss that was scaled
        self._num_backwards = 0  # since the last boundary, where those are the user's
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

    def _num_samples(self) -> int:
        """Of all ranks in the step at hand: of as many backwards as there were, or are to be."""
        if self.config.manages_accumulation:
            return self.train_batch_size()
        return self._num_backwards * self._micro_batch_size * self.group.world_size

    def _begin_anew(self) -> None:
        """Forget micro-batches since the last boundary, and their gradients."""
        self.zero_grad()
        self._accumulation.num_pending = self._num_backwards = 0
        self._was_applied = self._was_scaled = False
        self._wait_or_not()

    def _watched(self, outputs: Any) -> Any:
        """What `forward` returned, with hooks for a direct backward; see NOTE(direct)."""
        if self.gradient_accumulation_steps() == 1 and not self.config.needs_scaled_loss:
            return outputs
        entries = {id(tensor): tensor for tensor in _tensors_in(outputs) if tensor.grad_fn}
        if len(entries) > 1:
            entries = {key: tensor.view_as(tensor) for key, tensor in entries.items()}
            outputs = _replaced(outputs, entries)
        for tensor in entries.values():
            tensor.register_hook(self._enter)
        return outputs

    def _enter(self, grad: Tensor) -> Tensor | None:
        """A backward reaches an output."""
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
        """A backward begins, or goes on, at a loss that was scaled."""
        self._scaled_backward = current_backward()

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


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in tuples, lists and dictionaries, which is where DeepSpeed looks for them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _replaced(value: Any, by_id: Mapping[int, Tensor]) -> Any:
    """The same with other tensors in it; lists and dictionaries are changed in place."""
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
