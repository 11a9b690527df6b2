"""What "auto" means in a configuration file, as far as Hugging Face derives it from a model."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

HIDDEN_SIZE_KEYS: Final = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


def derived_values(model: nn.Module | None, *, lr: float | None) -> dict[str, Any]:
    """Values by path of key, as transformers' Trainer fills them in (its docs, "DeepSpeed"). Local.

    Args:
        model: One whose `config` has `hidden_size`, or `hidden_sizes` of which the largest counts,
            by itself or in its `text_config`.
        lr: The optimizer's, up to which a scheduler warms up.
    """
    found: dict[str, Any] = {"scheduler.params.warmup_min_lr": 0}
    if lr is not None:
        found["scheduler.params.warmup_max_lr"] = lr
    hidden_size = _hidden_size(getattr(model, "config", None))
    if hidden_size is not None:
        square = hidden_size * hidden_size
        found |= zip(HIDDEN_SIZE_KEYS, (square, int(0.9 * square), 10 * hidden_size), strict=True)
    return found


def _hidden_size(config: Any) -> int | None:
    for part in (config, getattr(config, "text_config", None)):
        sizes = getattr(part, "hidden_size", None) or getattr(part, "hidden_sizes", None)
        if sizes:
            return max(sizes) if isinstance(sizes, list | tuple) else int(sizes)
    return None
