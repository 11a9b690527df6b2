"""What the guide to precision shows runs as it stands, and trains as plain torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import zero_engine
from torch import Tensor

PAGE: Final = Path(__file__).parents[3] / "docs" / "guides" / "precision.md"
STEPS: Final = 20


def test_fp16_in_a_plain_loop_skips_and_scales() -> None:
    """It is copied as it is: a scale that is forgotten in one place trains, to other weights."""
    below = PAGE.read_text().partition("\n## fp16 in a plain loop\n")[2]
    source, namespace = below.partition("```python\n")[2].partition("```\n")[0], dict[str, Any]()
    assert f"range({STEPS})" in source and "DynamicLossScale())" in source
    source = source.replace("DynamicLossScale()", "DynamicLossScale(initial_power=20)")  # overflows

    exec(compile(source, str(PAGE), "exec"), namespace)

    expected, num_skipped = _train_plainly(2.0**20)
    assert 0 < num_skipped < STEPS // 2
    # The first overflow is forgiven, as hysteresis is 2; the window of 1000 is not over.
    assert namespace["scaler"].scale == 2.0 ** (20 - (num_skipped - 1))
    for param, value in zip(namespace["model"].parameters(), expected, strict=True):
        masters = zero_engine.full_param(param)
        assert masters is not None and masters.dtype == torch.float32
        torch.testing.assert_close(masters, value, rtol=1e-3, atol=1e-5)


def _train_plainly(scale: float) -> tuple[list[Tensor], int]:
    """With torch alone: masters by hand, and another scale wherever the last one was too large."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    optimizer, params = torch.optim.AdamW(masters, lr=1e-2), list(model.half().parameters())
    num_skipped = 0
    torch.manual_seed(0)  # of rank 0, for its batches
    for _ in range(STEPS):
        x = torch.randn(32, 16, dtype=torch.float16)
        loss = (model(x) - x[:, :1]).float().square().mean()
        grads = torch.autograd.grad(loss * scale, params)
        if all(grad.isfinite().all() for grad in grads):
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.float() / scale
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            torch._foreach_copy_([param.detach() for param in params], masters)
        else:
            scale /= 2 if num_skipped else 1
            num_skipped += 1
    return [master.detach() for master in masters], num_skipped
