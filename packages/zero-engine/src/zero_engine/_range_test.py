"""The test for the largest learning rate. See _schedule.py for k and for where it comes from."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from ._checks import check_flag
from ._schedule import PerGroup, Schedule


class LRRangeTest(Schedule):
    """An ever larger learning rate, to find the largest that trains (arXiv 1803.09820).

    min (1 + lr_range_test_step_rate k / lr_range_test_step_size), the quotient rounded down where
    staircase.

    Args:
        optimizer: Whose learning rates are set.
        lr_range_test_min_lr: The first one; a list has one for each param group.
        lr_range_test_step_size: Steps after which the rate has its effect once.
        lr_range_test_step_rate: See above.
        lr_range_test_staircase: See above.
        last_batch_iteration: To resume after that step; -1 at the start.

    Raises:
        ConfigError: Names the option, what was expected and what came.
    """

    def __init__(  # noqa: PLR0917, the order of DeepSpeed's
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 0.001,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = self.per_group("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self.step_size = self.whole("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = self.number("lr_range_test_step_rate", lr_range_test_step_rate)
        name = self.name("lr_range_test_staircase")
        self.is_staircase = check_flag(name, lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """One for each param group."""
        steps = self.last_epoch // self.step_size * self.step_size
        progress = (steps if self.is_staircase else self.last_epoch) / self.step_size
        return [low * (1 + self.step_rate * progress) for low in self.min_lrs]
