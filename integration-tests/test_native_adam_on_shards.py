"""zero-offload's CPU optimizers, stepping shards: each package may be used with the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import zero_engine
import zero_offload
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Precision, ZeroConfig

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, None), (1, None), (2, None), (3, None), (1, torch.bfloat16), (3, torch.bfloat16)],
    ids=str,
)
def test_the_native_adam_steps_shards_and_clips_on_the_way(
    ranks, stage: int, dtype: torch.dtype | None
) -> None:
    """Shards are slices of other memory; unscaling and clipping are left to the step."""
    ranks(2).run(_compare, stage=stage, dtype=dtype)


def _compare(group: Group, stage: int, dtype: torch.dtype | None) -> None:
    options = {"lr": 1e-2, "weight_decay": 1e-2}
    expected = _train(group, stage, dtype, partial(torch.optim.AdamW, **options))

    found = _train(group, stage, dtype, partial(zero_offload.CPUAdam, **options))

    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-5, atol=1e-6)


def _train(
    group: Group, stage: int, dtype: torch.dtype | None, make: Callable[..., torch.optim.Optimizer]
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # without a compiler: the same in plain torch
        optimizer = make(model.parameters())
    precision = None if dtype is None else Precision(params=dtype)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=precision), group=group)
    for step in range(4):
        generator = torch.Generator().manual_seed(2 * step + group.rank)
        x = torch.randn(4, 9, generator=generator).to(dtype or torch.float32)
        (model(x).float().square().mean() * 16.0).backward()
        report = zero_engine.unscale_and_clip_(model, scale=16.0, max_norm=0.1, in_step=True)
        assert report.is_in_step == (step > 0 and isinstance(optimizer, zero_offload.CPUAdam))
        optimizer.step()
        optimizer.zero_grad()
    return zero_engine.full_state_dict(model)
