"""Schedulers that begin with a warmup. See _schedule.py for k and for where they come from."""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ._errors import ConfigError
from ._schedule import PerGroup, Schedule


class _Warmup(Schedule):
    """What the three warmups share: how far along it is, from 0 to 1."""

    total_num_steps: int  # of those that end

    def _set_warmup(self, num_steps: Any, kind: Any) -> None:
        # Below two steps there is nothing between the ends, and log(1) = 0 to divide by.
        self.warmup_num_steps = max(2, self.whole("warmup_num_steps", num_steps, 0))
        if kind not in ("log", "linear"):
            raise ConfigError(
                f"{self.name('warmup_type')}: expected 'log' or 'linear', got {kind!r}"
            )
        self.warmup_type = kind

    def _warn_of_a_short_total(self) -> None:
        if self.total_num_steps < self.warmup_num_steps:
            warnings.warn(
                f"{self.name('total_num_steps')}: {self.total_num_steps} steps in total are "
                f"fewer than the {self.warmup_num_steps} of the warmup (warmup_num_steps)",
                stacklevel=3,
            )

    @property
    def _iteration(self) -> int:
        return max(0, self.last_epoch - 1)

    def _warmed(self) -> float | None:
        """None once the warmup is over."""
        if self._iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return self._iteration / self.warmup_num_steps
        return math.log(self._iteration + 1) / math.log(self.warmup_num_steps)


class WarmupLR(_Warmup):
    """From a small learning rate to a large one, which stays.

    With i = max(0, k - 1), w = max(2, warmup_num_steps) and g = log(i + 1) / log(w), or i / w where
    linear: min + (max - min) g while i < w, then max.

    Args:
        optimizer: Whose learning rates are set.
        warmup_min_lr: The first one; a list has one for each param group.
        warmup_max_lr: The last one; that of the optimizer when None.
        warmup_num_steps: Steps in between.
        warmup_type: "log" or "linear".
        last_batch_iteration: To resume after that step; -1 at the start.

    Raises:
        ConfigError: Names the option, what was expected and what came.
    """

    def __init__(  # noqa: PLR0917, the order of DeepSpeed's
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self.per_group("warmup_min_lr", warmup_min_lr, optimizer)
        self.max_lrs = self.per_group("warmup_max_lr", warmup_max_lr, optimizer)
        self._set_warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """One for each param group."""
        warmed = self._warmed()
        gamma = self._after() if warmed is None else warmed
        return [
            small + (large - small) * gamma
            for small, large in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then down to the small learning rate in a straight line.

    After the warmup: min + (max - min) max(0, (t - i) / max(1, t - w)), with t = total_num_steps
    and the letters of `WarmupLR`.

    Args:
        optimizer: Whose learning rates are set.
        total_num_steps: When the small learning rate is reached again. Where these are fewer than
            those of the warmup, there is a warning, and the learning rate drops after the warmup.
        warmup_min_lr: The first one and the last one; a list has one for each param group.
        warmup_max_lr: The largest one; that of the optimizer when None.
        warmup_num_steps: Steps from the one to the other.
        warmup_type: "log" or "linear".
        last_batch_iteration: To resume after that step; -1 at the start.

    Raises:
        ConfigError: Names the option, what was expected and what came.
    """

    def __init__(  # noqa: PLR0917, the order of DeepSpeed's
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = self.whole("total_num_steps", total_num_steps, 0)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        self._warn_of_a_short_total()

    def _after(self) -> float:
        left = self.total_num_steps - self._iteration
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """From a small part of the optimizer's learning rate to all of it, then down in half a cosine.

    The ratio to the optimizer's learning rate is r + (1 - r) g in the warmup, with r =
    warmup_min_ratio and the letters of `WarmupLR`; then c + (1 - c) (1 + cos(pi p)) / 2, with c =
    cos_min_ratio, p = min(1, (i - w + 1) / max(1, t - w)) and t = total_num_steps.

    Args:
        optimizer: Whose learning rates are set; those that it has are the largest.
        total_num_steps: When the last ratio is reached. Where these are fewer than those of the
            warmup, there is a warning, and the learning rate drops after the warmup.
        warmup_min_ratio: The first ratio.
        warmup_num_steps: Steps of the warmup.
        cos_min_ratio: The last ratio.
        warmup_type: "log" or "linear".
        last_batch_iteration: To resume after that step; -1 at the start.

    Raises:
        ConfigError: Names the option, what was expected and what came.
    """

    def __init__(  # noqa: PLR0917, the order of DeepSpeed's
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._set_warmup(warmup_num_steps, warmup_type)
        self.total_num_steps = self.whole("total_num_steps", total_num_steps, 0)
        self.warmup_min_ratio = self.number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = self.number("cos_min_ratio", cos_min_ratio)
        super().__init__(optimizer, last_batch_iteration)
        self._warn_of_a_short_total()

    def get_lr(self) -> list[float | Tensor]:
        """One for each param group."""
        low, part = self.warmup_min_ratio, self._warmed()
        if part is None:
            steps = self._iteration - self.warmup_num_steps + 1
            decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
            low = self.cos_min_ratio
            part = (1 + math.cos(math.pi * min(1.0, steps / decay_steps))) / 2
        return [lr * (low + (1 - low) * part) for lr in self.base_lrs]
