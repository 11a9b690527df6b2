"""Optimizers that wrap another, as their public implementations do, train and resume as plain."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import Offload
from zero_partition import PartitionError

NUM_STEPS: Final = 3  # before and after; weights are pulled back every second step


class Lookahead(torch.optim.Optimizer):
    """Weights are pulled back every k steps (arXiv 1907.08610); skips the constructor."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 2) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._base_optimizer, self.param_groups = base, base.param_groups
        self.defaults, self.state = base.defaults, defaultdict(dict)
        for group in self.param_groups:
            group |= {"k": k, "num_steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: D102
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["num_steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                slow = self._base_optimizer.state[param].setdefault("slow", param.clone())
                if group["num_steps"] % group["k"] == 0:
                    slow.lerp_(param, 0.5)
                    param.copy_(slow)
        return loss

    def state_dict(self) -> Any:  # noqa: D102
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:  # noqa: D102
        self._base_optimizer.load_state_dict(state_dict)


class OwnState(Lookahead):
    """Keeps the slow weights in its own state, apart from that of the optimizer inside."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: D102
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["num_steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    slow = self.state[param].setdefault("slow", param.clone())
                    slow.lerp_(param, 0.5 * (group["num_steps"] % group["k"]))
                    param.copy_(slow)
        return loss


class SAM(torch.optim.Optimizer):
    """Evaluates the loss again at a point up the slope (arXiv 2010.01412)."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: D102
        with torch.enable_grad():
            loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm(p=2) for p in params]).norm(p=2)
        for param in params:
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad * (self.param_groups[0]["rho"] / norm))
        with torch.enable_grad():
            self.zero_grad()
            closure()
        for param in params:
            param.data = self.state[param]["old"]
        self.base_optimizer.step()
        return loss


def _lookahead(params: Any, kind: type[Lookahead] = Lookahead) -> torch.optim.Optimizer:
    return kind(torch.optim.SGD(params, lr=0.1, momentum=0.9))


MAKERS: Final[dict[str, Any]] = {
    "Lookahead": _lookahead,
    "OwnState": lambda params: _lookahead(params, OwnState),
    "SAM": lambda params: SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9),
}
STAGES: Final = [(n, s) for n in MAKERS for s in parity.STAGES if n != "SAM" or s == 0]


def _build(name: str) -> tuple[nn.Module, Any]:
    model = parity.build(parity.tiny_float32)
    return model, MAKERS[name]([p for p in model.parameters() if p.requires_grad])


def _steps(model: nn.Module, optimizer: Any, first: int) -> list[float]:
    losses = []
    for step in range(first, first + NUM_STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = parity.loss_of(model, parity.batch(step, 0, 0))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_a_wrapper_trains_resumes_and_is_given_back(
    group: Group, tmp_path: Path, name: str, stage: int
) -> None:
    """All that the two keep is saved: momentum of the one inside, weights of the other."""
    plain, plain_optimizer = _build(name)
    expected = _steps(plain, plain_optimizer, 0), _steps(plain, plain_optimizer, NUM_STEPS)
    model, optimizer = _build(name)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    assert_close(_steps(model, optimizer, 0), expected[0])
    zero_engine.save(tmp_path, model, optimizer, step=1)
    whole = zero_engine.full_optimizer_state_dict(model)
    assert group.rank or all("momentum_buffer" in s for s in whole["state"].values())

    other, other_optimizer = _build(name)
    later = 3 - stage if stage else 0
    zero_engine.shard(other, other_optimizer, ZeroConfig(later), group=group)
    zero_engine.load(tmp_path, other, other_optimizer)
    assert_close(_steps(other, other_optimizer, NUM_STEPS), expected[1])
    zero_engine.unshard(model, optimizer)
    assert_close(_steps(model, optimizer, NUM_STEPS), expected[1])


def test_state_of_a_wrapper_stays_on_the_device(group: Group) -> None:
    model, optimizer = _build("Lookahead")
    config = ZeroConfig(1, offload=Offload(optimizer="host"))
    with pytest.raises(
        PartitionError, match=r"of a Lookahead cannot be offloaded, .*wraps another"
    ):
        zero_engine.shard(model, optimizer, config, group=group)
