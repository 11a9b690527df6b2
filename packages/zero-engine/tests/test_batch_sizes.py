"""Two of the three batch sizes say the third."""

from __future__ import annotations

import itertools
from typing import Final

import pytest
from zero_engine import ConfigError
from zero_engine.deepspeed import EngineConfig

SIZES: Final = (None, 1, 2, 3, 4, 6, 8, 12)
KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_inference_agrees_with_trying_all(world_size: int) -> None:
    """A batch of another size trains another model, and nobody sees it."""
    for given in itertools.product(SIZES, repeat=3):
        expected = _by_trying(*given, world_size=world_size)

        raw = {key: size for key, size in zip(KEYS, given, strict=True) if size is not None}

        if expected is None:
            with pytest.raises(ConfigError, match=r"^train_batch_size: "):
                EngineConfig.from_deepspeed(raw, world_size=world_size)
        else:
            found = EngineConfig.from_deepspeed(raw, world_size=world_size)
            sizes = (found.train_batch_size, found.micro_batch_size, found.accumulation_steps)
            assert sizes == expected


def _by_trying(
    train: int | None, micro: int | None, steps: int | None, *, world_size: int
) -> tuple[int, int, int] | None:
    if train is None and micro is None:
        return None
    if steps is None and (train is None or micro is None):
        steps = 1  # where nothing says more
    fits = [
        (micro_ * steps_ * world_size, micro_, steps_)
        for micro_ in range(1, 13)
        for steps_ in range(1, 13)
        if micro in (None, micro_) and steps in (None, steps_)
    ]
    fits = [fit for fit in fits if train in (None, fit[0])]
    assert len(fits) <= 1
    return fits[0] if fits else None
