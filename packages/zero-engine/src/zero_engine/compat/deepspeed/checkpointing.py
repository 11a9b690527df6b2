"""deepspeed.checkpointing: its names; what they do comes with zero-ckpt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from zero_engine import NotBuiltError


def _later(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotBuiltError(
            f"deepspeed.checkpointing.{name}() comes with zero-ckpt, which is not built yet; "
            "torch.utils.checkpoint.checkpoint works in sharded models"
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Raises NotBuiltError: it comes with zero-ckpt."
    return refuse


configure = _later("configure")
checkpoint = _later("checkpoint")
non_reentrant_checkpoint = _later("non_reentrant_checkpoint")
model_parallel_cuda_manual_seed = _later("model_parallel_cuda_manual_seed")
model_parallel_reconfigure_tp_seed = _later("model_parallel_reconfigure_tp_seed")
get_cuda_rng_tracker = _later("get_cuda_rng_tracker")
partition_activations_in_checkpoint = _later("partition_activations_in_checkpoint")
set_num_layers = _later("set_num_layers")
reset = _later("reset")


def is_configured() -> bool:
    """No: `configure` is not built yet."""
    return False
