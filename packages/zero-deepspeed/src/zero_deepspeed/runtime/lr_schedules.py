"""deepspeed.runtime.lr_schedules: the five schedulers, whose arguments are DeepSpeed's."""

from zero_deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
