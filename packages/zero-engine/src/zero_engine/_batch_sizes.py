"""The three batch sizes, of which two say the third. Arithmetic only."""

from __future__ import annotations

from typing import final

from attrs import frozen

from ._errors import ConfigError


@final
@frozen
class BatchSizes:
    """Samples per step of the optimizer, per forward of a rank, and forwards per step."""

    train: int
    micro: int
    accumulation_steps: int

    @classmethod
    def infer(
        cls,
        train: int | None,
        micro: int | None,
        accumulation_steps: int | None,
        *,
        world_size: int,
    ) -> BatchSizes:
        """Fill in what is None, as DeepSpeed does: one accumulation step where nothing says more.

        Raises:
            ConfigError: Neither `train` nor `micro` is known, or train is not
                micro * accumulation_steps * world_size.
        """
        if train is None and micro is None:
            raise ConfigError(
                "train_batch_size: expected it, or train_micro_batch_size_per_gpu, got neither"
            )
        if accumulation_steps is None:
            is_open = train is None or micro is None
            accumulation_steps = 1 if is_open else train // (micro * world_size)
        if train is None:
            assert micro is not None, "one of the two is there"
            train = micro * accumulation_steps * world_size
        if micro is None:
            micro = train // (accumulation_steps * world_size)
        if train != micro * accumulation_steps * world_size:
            raise ConfigError(
                f"train_batch_size: expected train_micro_batch_size_per_gpu {micro} * "
                f"gradient_accumulation_steps {accumulation_steps} * world size {world_size} = "
                f"{micro * accumulation_steps * world_size}, got {train}; leave one of the three "
                "out to have it inferred"
            )
        return cls(train, micro, accumulation_steps)
