"""What the schedulers by name share: a learning rate that depends on the number of steps alone.

Names, defaults and formulas are those that deepspeed.readthedocs.io/en/latest/schedulers.html
documents. Every formula says what holds after k calls of `step()`, k = 0 being the first optimizer
step; `last_batch_iteration` is k - 1, so that -1 is the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ._checks import check_number, check_whole
from ._errors import ConfigError

PerGroup = float | Sequence[float]  # one value, or one for each param group


class Schedule(LRScheduler):
    """A learning rate that is a function of the number of steps alone."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups if last_batch_iteration != -1 else ():
            group.setdefault("initial_lr", group["lr"])  # torch asks for it when resuming
        super().__init__(optimizer, self.whole("last_batch_iteration", last_batch_iteration, -1))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another was; `{"last_batch_iteration": k - 1}` is what DeepSpeed's save."""
        if set(state_dict) == {"last_batch_iteration"}:
            said = self.whole("last_batch_iteration", state_dict["last_batch_iteration"], -1)
            self.last_epoch = said + 1
            self._last_lr = self.get_lr()
        else:
            super().load_state_dict(state_dict)

    def name(self, option: str) -> str:
        """Of an option, for messages."""
        return f"{type(self).__name__}.{option}"

    def number(
        self, option: str, value: Any, minimum: float = 0.0, below: float = math.inf
    ) -> float:
        """A finite number of at least `minimum`."""
        return check_number(self.name(option), value, minimum=minimum, below=below)

    def whole(self, option: str, value: Any, minimum: int) -> int:
        """A whole number of at least `minimum`."""
        return check_whole(self.name(option), value, minimum=minimum)

    def per_group(
        self, option: str, value: Any, optimizer: Optimizer, below: float = math.inf
    ) -> list[float]:
        """One number of at least 0 for each param group."""
        num_groups = len(optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [self.number(option, value, below=below)] * num_groups
        if len(value) != num_groups:
            raise ConfigError(
                f"{self.name(option)}: expected one number, or one for each of {num_groups} param "
                f"groups, got {len(value)}"
            )
        return [self.number(f"{option}[{i}]", each, below=below) for i, each in enumerate(value)]
