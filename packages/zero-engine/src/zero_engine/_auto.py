"""What "auto" means in a configuration file, as far as it follows from what a script has given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ._key_table import KEYS

HIDDEN_SIZE_KEYS: Final = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
_16_BIT: Final = {"fp16.enabled": torch.float16, "bf16.enabled": torch.bfloat16}
_OF_ARGS: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def derived_values(
    model: nn.Module | None, known: Mapping[str, Any], implied: Mapping[str, Any]
) -> dict[str, Any]:
    """Values by path of key, as transformers' Trainer fills them in (its docs, "DeepSpeed"). Local.

    Args:
        model: The dtype of all of its parameters says which 16-bit section is on. Its `config` may
            have `hidden_size`, or `hidden_sizes` of which the largest counts, by itself or in its
            `text_config`.
        known: What the file says, by path. A scheduler warms up to the optimizer's rate.
        implied: What follows from other arguments.
    """
    found: dict[str, Any] = {"scheduler.params.warmup_min_lr": 0, "steps_per_print": 0}
    lr = {**implied, **known}.get("optimizer.params.lr")
    if lr is not None:
        found["scheduler.params.warmup_max_lr"] = lr
    hidden_size = _hidden_size(getattr(model, "config", None))
    if hidden_size is not None:
        square = hidden_size * hidden_size
        found |= zip(HIDDEN_SIZE_KEYS, (square, int(0.9 * square), 10 * hidden_size), strict=True)
    params = () if model is None else model.parameters()
    dtypes = {param.dtype for param in params if param.is_floating_point()}
    said = {of for path, of in _16_BIT.items() if known.get(path) is True}
    if said or len(dtypes) == 1:
        found |= {path: of in (said or dtypes) for path, of in _16_BIT.items()}
    return {**found, **implied}


def implied_values(args: Any, optimizer: Any, lr_scheduler: Any) -> dict[str, Any]:
    """What arguments of `initialize` say, by path of key. Local.

    Args:
        args: Its attributes by the names of batch sizes and clipping, where it has them.
        optimizer: An instance's options are those of the file's; of anything else, and of a
            scheduler, the file's are not read, and have their defaults.
        lr_scheduler: Likewise.
    """
    found = {path: getattr(args, path, None) for path in _OF_ARGS}
    for name, given in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        if given is not None:
            found |= {path: KEYS[path].default for path in KEYS if path.startswith(f"{name}.")}
    if isinstance(optimizer, torch.optim.Optimizer):
        for option in ("lr", "betas", "eps", "weight_decay", "momentum"):
            values = [_option(group, option) for group in optimizer.param_groups]
            if all(value == values[0] for value in values):
                found[f"optimizer.params.{option}"] = values[0]
    return {
        path: value
        for path, value in found.items()
        if value is not None or path.startswith(("optimizer.", "scheduler."))
    }


def _option(group: Mapping[str, Any], name: str) -> Any:
    value = group.get(f"initial_{name}", group.get(name))  # before a scheduler's first step
    return value.item() if isinstance(value, Tensor) else value


def _hidden_size(config: Any) -> int | None:
    for part in (config, getattr(config, "text_config", None)):
        sizes = getattr(part, "hidden_size", None) or getattr(part, "hidden_sizes", None)
        if sizes:
            return max(sizes) if isinstance(sizes, list | tuple) else int(sizes)
    return None
