"""One cycle of learning rate and momentum. See _schedule.py for k and for where it comes from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ._checks import check_flag
from ._schedule import PerGroup, Schedule


class OneCycle(Schedule):
    """Up and down once, the momentum down and up meanwhile; then both may decay (arXiv 1803.09820).

    In the cycle of c = first + second steps, s = k / first while k <= first, then (c - k) / second;
    with n stairs, floor(n s) / n. Learning rate: min + (max - min) s. Momentum: max - (max - min)
    s. After the cycle, with d = (k - c) / decay_step_size, or 0 where that is 0: min / (1 +
    decay_lr_rate d), and max (1 + decay_mom_rate d).

    The momentum is the first of `betas` in a param group, or `momentum` where that is not 0; the
    second of the betas stays as it is.

    Args:
        optimizer: Whose learning rates and momenta are set.
        cycle_min_lr: Where the cycle begins and ends; a list has one for each param group.
        cycle_max_lr: Its peak.
        decay_lr_rate: See above.
        cycle_first_step_size: Steps up.
        cycle_second_step_size: Steps down; as many as up when None.
        cycle_first_stair_count: Stairs up; 0 for a straight line.
        cycle_second_stair_count: Stairs down; as many as up when None.
        decay_step_size: Steps after which a rate has its effect once; 0 for no decay.
        cycle_momentum: Whether the momentum moves; a warning where no param group has one.
        cycle_min_mom: The momentum at the peak.
        cycle_max_mom: The momentum where the cycle begins and ends.
        decay_mom_rate: See above.
        last_batch_iteration: To resume after that step; -1 at the start.

    Raises:
        ConfigError: Names the option, what was expected and what came.
    """

    def __init__(  # noqa: PLR0917, the order of DeepSpeed's
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        self.min_lrs = self.per_group("cycle_min_lr", cycle_min_lr, optimizer)
        self.max_lrs = self.per_group("cycle_max_lr", cycle_max_lr, optimizer)
        self.min_moms = self.per_group("cycle_min_mom", cycle_min_mom, optimizer, below=1)
        self.max_moms = self.per_group("cycle_max_mom", cycle_max_mom, optimizer, below=1)
        self.first_steps = self.whole("cycle_first_step_size", cycle_first_step_size, 1)
        self.second_steps = self.whole("cycle_second_step_size", cycle_second_step_size, 0)
        self.first_stairs = self.whole("cycle_first_stair_count", cycle_first_stair_count, 0)
        self.second_stairs = self.whole("cycle_second_stair_count", cycle_second_stair_count, 0)
        self.decay_steps = self.whole("decay_step_size", decay_step_size, 0)
        self.decay_lr_rate = self.number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = self.number("decay_mom_rate", decay_mom_rate, -math.inf)
        self.cycle_momentum = check_flag(self.name("cycle_momentum"), cycle_momentum)
        # Asked once: a momentum of 0 that the cycle itself sets does not end it.
        self.momentum_keys = [_momentum_key(group) for group in optimizer.param_groups]
        if cycle_momentum and not any(self.momentum_keys):
            warnings.warn(
                f"{self.name('cycle_momentum')}: no param group of {type(optimizer).__name__} has "
                "betas or a momentum above 0, so there is none to cycle; set it to false",
                stacklevel=2,
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """One for each param group. Sets their momenta, too, as torch's OneCycleLR does."""
        if self.cycle_momentum:
            self._set_momenta()
        decayed = self._decayed()
        if decayed is not None:
            return [low / (1 + self.decay_lr_rate * decayed) for low in self.min_lrs]
        height = self._height()
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * height for low, high in pairs]

    def _set_momenta(self) -> None:
        decayed = self._decayed()
        moms = zip(self.min_moms, self.max_moms, strict=True)
        for group, key, (low, high) in zip(
            self.optimizer.param_groups, self.momentum_keys, moms, strict=True
        ):
            if decayed is not None:
                momentum = high * (1 + self.decay_mom_rate * decayed)
            else:
                momentum = high - (high - low) * self._height()
            if key == "betas":
                group["betas"] = (momentum, *group["betas"][1:])
            elif key is not None:
                group[key] = momentum

    def _decayed(self) -> float | None:
        """How many decay steps since the cycle ended; None while it lasts."""
        steps = self.last_epoch - self.first_steps - self.second_steps
        if steps < 0:
            return None
        return steps / self.decay_steps if self.decay_steps else 0.0

    def _height(self) -> float:
        """From 0 to 1 and back."""
        step, size, stairs = self.last_epoch, self.first_steps, self.first_stairs
        if step > size:
            step = self.first_steps + self.second_steps - step
            size, stairs = self.second_steps, self.second_stairs
        # In whole numbers: 1 / 3 * 3 stairs must not come out just below the stair.
        return (step * stairs // size) / stairs if stairs else step / size


def _momentum_key(group: Mapping[str, Any]) -> str | None:
    if "betas" in group:
        return "betas"
    return "momentum" if group.get("momentum") else None
