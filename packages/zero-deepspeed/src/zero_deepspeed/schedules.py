"""The five learning-rate schedulers that DeepSpeed's files name, as schedulers of torch.

In their formulas k counts the scheduler's steps, from 0. Options are checked as a file's are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from zero_comm.logs import warn_user
from zero_engine import ConfigError
from zero_engine.checks import check_names
from zero_partition.plan import nearest

from .configuration.keys import KEYS

# One value for all param groups, or one for each.
PerGroup = float | Sequence[float]


class LearningRateSchedule(LRScheduler):
    """A learning rate that is a function of the number of steps alone.

    All five schedules take `optimizer`, whose learning rates they set, and `last_batch_iteration`,
    the step to resume after, -1 at the start. They raise ConfigError, which names the option, what
    was expected and what came. A learning rate or momentum may be a list with one value for each
    param group.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups if last_batch_iteration != -1 else ():
            # torch requires this entry in a group when a schedule is resumed.
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, self.option("last_batch_iteration", last_batch_iteration))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another was; `{"last_batch_iteration": k - 1}` is what DeepSpeed's save."""
        if set(state_dict) == {"last_batch_iteration"}:
            said = self.option("last_batch_iteration", state_dict["last_batch_iteration"])
            self.last_epoch = said + 1
            self._last_lr = self.get_lr()
        else:
            super().load_state_dict(state_dict)

    def option(self, name: str, value: Any) -> Any:
        """Return the value of an option, checked as the key of that name in a file is."""
        return KEYS[f"scheduler.params.{name}"].kind.read(f"{type(self).__name__}.{name}", value)

    def per_group(self, name: str, value: Any, optimizer: Optimizer) -> list[float]:
        """Return one number for each param group."""
        value, num_groups = self.option(name, value), len(optimizer.param_groups)
        values = value if isinstance(value, tuple) else (value,) * num_groups
        if len(values) != num_groups:
            raise ConfigError(
                f"{type(self).__name__}.{name}: expected one number, or one for each of "
                f"{num_groups} param groups, got {len(values)}"
            )
        return list(map(float, values))


class OneCycle(LearningRateSchedule):
    """One cycle: the learning rate goes up and down, the momentum down and up (arXiv 1803.09820).

    After the cycle both may decay. In the cycle of c = first + second steps, s = k / first while
    k <= first, then (c - k) / second; with n stairs, floor(n s) / n. Learning rate: min + (max -
    min) s. Momentum: max - (max - min) s. After the cycle, with d = (k - c) / decay_step_size, or 0
    where that is 0: min / (1 + decay_lr_rate d), and max (1 + decay_mom_rate d).

    The momentum is the first of `betas` in a param group, or `momentum` where that is not 0; the
    second of the betas stays as it is.

    Args:
        cycle_min_lr: Where the cycle begins and ends.
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
        self.min_moms = self.per_group("cycle_min_mom", cycle_min_mom, optimizer)
        self.max_moms = self.per_group("cycle_max_mom", cycle_max_mom, optimizer)
        self.first_steps = self.option("cycle_first_step_size", cycle_first_step_size)
        self.second_steps = self.option("cycle_second_step_size", cycle_second_step_size)
        self.first_stairs = self.option("cycle_first_stair_count", cycle_first_stair_count)
        self.second_stairs = self.option("cycle_second_stair_count", cycle_second_stair_count)
        self.decay_steps = self.option("decay_step_size", decay_step_size)
        self.decay_lr_rate = self.option("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = self.option("decay_mom_rate", decay_mom_rate)
        self.cycle_momentum = self.option("cycle_momentum", cycle_momentum)
        # Computed once, since a momentum of 0 that the cycle sets must not end it.
        self.momentum_keys = [_momentum_key(group) for group in optimizer.param_groups]
        if self.cycle_momentum and not any(self.momentum_keys):
            warn_user(
                f"OneCycle.cycle_momentum: no param group of {type(optimizer).__name__} has "
                "betas or a momentum above 0, so there is none to cycle; set it to false",
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return a rate for each param group. Sets momenta, too, as torch's OneCycleLR does."""
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
        """Return the number of decay steps since the cycle ended; None while it lasts."""
        steps = self.last_epoch - self.first_steps - self.second_steps
        if steps < 0:
            return None
        return steps / self.decay_steps if self.decay_steps else 0.0

    def _height(self) -> float:
        """Return the height in the cycle, from 0 to 1 and back: the s of the class's formula."""
        step, size, stairs = self.last_epoch, self.first_steps, self.first_stairs
        if step > size:
            step = self.first_steps + self.second_steps - step
            size, stairs = self.second_steps, self.second_stairs
        # In integers, since 1 / 3 * 3 stairs must not be just below a stair.
        return (step * stairs // size) / stairs if stairs else step / size


def _momentum_key(group: Mapping[str, Any]) -> str | None:
    if "betas" in group:
        return "betas"
    return "momentum" if group.get("momentum") else None


class LRRangeTest(LearningRateSchedule):
    """An ever larger learning rate, to find the largest that trains (arXiv 1803.09820).

    min (1 + lr_range_test_step_rate k / lr_range_test_step_size), the quotient rounded down where
    staircase.

    Args:
        lr_range_test_min_lr: The first one.
        lr_range_test_step_size: Steps after which the rate has its effect once.
        lr_range_test_step_rate: See above.
        lr_range_test_staircase: See above.
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
        self.step_size = self.option("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = self.option("lr_range_test_step_rate", lr_range_test_step_rate)
        self.is_staircase = self.option("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return one learning rate for each param group."""
        steps = self.last_epoch // self.step_size * self.step_size
        progress = (steps if self.is_staircase else self.last_epoch) / self.step_size
        return [low * (1 + self.step_rate * progress) for low in self.min_lrs]


class _Warmup(LearningRateSchedule):
    """Base of the three schedules with a warmup: its progress, from 0 to 1."""

    # Schedules that end set another number.
    total_num_steps: float = math.inf

    def _set_warmup(self, num_steps: Any, kind: Any) -> None:
        # With fewer than two steps there is nothing in between, and log(1) = 0 would be a divisor.
        self.warmup_num_steps = max(2, self.option("warmup_num_steps", num_steps))
        self.warmup_type = self.option("warmup_type", kind)
        if self.total_num_steps < self.warmup_num_steps:
            warn_user(
                f"{type(self).__name__}.total_num_steps: {self.total_num_steps} steps in total are "
                f"fewer than the {self.warmup_num_steps} of the warmup (warmup_num_steps)",
            )

    @property
    def _iteration(self) -> int:
        return max(0, self.last_epoch - 1)

    def _warmed(self) -> float | None:
        """Return the progress of the warmup, from 0 to 1; None once it is over."""
        if self._iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return self._iteration / self.warmup_num_steps
        return math.log(self._iteration + 1) / math.log(self.warmup_num_steps)


class WarmupLR(_Warmup):
    """Warmup from a small learning rate to a large one, which stays.

    With i = max(0, k - 1), w = max(2, warmup_num_steps) and g = log(i + 1) / log(w), or i / w where
    linear: min + (max - min) g while i < w, then max.

    Args:
        warmup_min_lr: The first one.
        warmup_max_lr: The last one; that of the optimizer when None.
        warmup_num_steps: Steps in between.
        warmup_type: "log" or "linear".
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
        """Return one learning rate for each param group."""
        warmed = self._warmed()
        gamma = self._after() if warmed is None else warmed
        ends = zip(self.min_lrs, self.max_lrs, strict=True)
        return [small + (large - small) * gamma for small, large in ends]

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warmup of `WarmupLR`, then a linear decay to the small learning rate.

    After the warmup: min + (max - min) max(0, (t - i) / max(1, t - w)), with t = total_num_steps
    and the letters of `WarmupLR`.

    Args:
        total_num_steps: When the small learning rate is reached again. Where these are fewer than
            those of the warmup, there is a warning, and the learning rate drops after the warmup.
        warmup_min_lr: The first one and the last one.
        warmup_max_lr: The largest one; that of the optimizer when None.
        warmup_num_steps: Steps from the one to the other.
        warmup_type: "log" or "linear".
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
        self.total_num_steps = self.option("total_num_steps", total_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _after(self) -> float:
        left = self.total_num_steps - self._iteration
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Warmup from a part of the optimizer's learning rate to all of it, then half a cosine down.

    The ratio to the optimizer's learning rate, which is the largest, is r + (1 - r) g in the
    warmup, with r = warmup_min_ratio and the letters of `WarmupLR`; then c + (1 - c) (1 + cos(pi
    p)) / 2, with c = cos_min_ratio, p = min(1, (i - w + 1) / max(1, t - w)), t = total_num_steps.

    Args:
        total_num_steps: When the last ratio is reached. Where these are fewer than those of the
            warmup, there is a warning, and the learning rate drops after the warmup.
        warmup_min_ratio: The first ratio.
        warmup_num_steps: Steps of the warmup.
        cos_min_ratio: The last ratio.
        warmup_type: "log" or "linear".
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
        self.total_num_steps = self.option("total_num_steps", total_num_steps)
        self._set_warmup(warmup_num_steps, warmup_type)
        self.warmup_min_ratio = self.option("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = self.option("cos_min_ratio", cos_min_ratio)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return one learning rate for each param group."""
        low, part = self.warmup_min_ratio, self._warmed()
        if part is None:
            steps = self._iteration - self.warmup_num_steps + 1
            decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
            low = self.cos_min_ratio
            part = (1 + math.cos(math.pi * min(1.0, steps / decay_steps))) / 2
        return [lr * (low + (1 - low) * part) for lr in self.base_lrs]


SCHEDULERS: Final[dict[str, type[LearningRateSchedule]]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def make_scheduler(optimizer: Optimizer, type: str, params: Mapping[str, Any]) -> LRScheduler:
    """The scheduler that the section `scheduler` of a configuration file asks for. Local.

    ConfigError names the key, as in `scheduler.params.warmup_num_steps`.
    """
    kind = SCHEDULERS.get(type)
    if kind is None:
        near = nearest(type, SCHEDULERS)
        raise ConfigError(
            f"scheduler.type: expected one of {', '.join(SCHEDULERS)}, got {type!r}"
            f"{f'; did you mean {near!r}?' if near else ''}. Any other scheduler is passed as an "
            "object: initialize(lr_scheduler=...)"
        )
    # The first parameter is the optimizer.
    options = dict(list(signature(kind).parameters.items())[1:])
    check_names("scheduler.params", params, options)
    for name, option in options.items():
        if option.default is option.empty and name not in params:
            raise ConfigError(f"scheduler.params.{name}: expected a value, as {type} needs it")
    try:
        return kind(optimizer, **params)
    except ConfigError as error:
        path = str(error).removeprefix(f"{type}.")
        raise ConfigError(f"scheduler.params.{path}") from error
