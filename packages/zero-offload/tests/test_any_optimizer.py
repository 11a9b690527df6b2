"""Optimizers that do what Adam does not step on the host as they do by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_offload import OffloadedOptimizer


class _Optimizer(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": self.first_count()})

    @staticmethod
    def first_count() -> Any:
        return 0

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if all(param.grad is None for param in group["params"]):
                continue
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    update = self.update(param.grad, self.state[param], group)
                    param.sub_(update * group["lr"] / float(group["count"]))

    def update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad


class _CountsInATensor(_Optimizer):
    """As optimi: the counter is a tensor of the group."""

    @staticmethod
    def first_count() -> Any:
        return torch.tensor(0, dtype=torch.int32)


class _CountsInAttributes(_Optimizer):
    """As heavyball: counts of steps, and methods bound by the constructor, in attributes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.num_steps, self.counts = 0, {"all": [0]}
        self.call = self.update_slowly

    def step(self) -> None:  # type: ignore[override]
        self.num_steps += 1
        self.counts["all"][0] += 1
        super().step()

    def update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return self.call(grad)

    def update_slowly(self, grad: Tensor) -> Tensor:
        return grad / (self.num_steps + self.counts["all"][0])


class _HasAFunction(_Optimizer):
    """As lion-pytorch: what it does is in an attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.update_fn = torch.sign

    def update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return self.update_fn(grad)


class _QuantizesLarge(_Optimizer):
    """As 8-bit ones: momentum is in codes where there are 4,096 elements or more."""

    def update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        is_large = grad.numel() >= 4096
        if not state:
            dtype = torch.uint8 if is_large else grad.dtype
            state["momentum"] = torch.zeros_like(grad, dtype=dtype)
            state["scale"] = torch.ones(1)
        momentum = (state["momentum"].float() - 128 * is_large) * state["scale"] * 0.5 + grad
        if is_large:
            state["scale"] = momentum.abs().amax().reshape(1) / 127
            codes = (momentum / state["scale"]).round() + 128
            state["momentum"].copy_(codes.clamp(0, 255))
        else:
            state["momentum"].copy_(momentum)
        return momentum


class _KeepsRows(_Optimizer):
    """A second entry has as many elements as a column, and another shape."""

    def update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state.setdefault("rows", torch.zeros(grad.numel())).add_(grad.reshape(-1))
        return state["rows"].view(grad.shape)


KINDS = (
    _Optimizer,
    _CountsInATensor,
    _CountsInAttributes,
    _HasAFunction,
    _QuantizesLarge,
    _KeepsRows,
)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 64), nn.Linear(64, 1))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 80) * (step + 1) / 50).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("state", ["host", "disk"])
@pytest.mark.parametrize("subgroup_bytes", [64, 2**20])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_steps_as_by_itself(kind: Any, subgroup_bytes: int, state: Any, tmp_path) -> None:
    """However many sub-groups there are: each begins with the numbers of before the step."""
    plain, model = _model(), _model()
    expected = kind(plain.parameters(), lr=0.05)
    _train(plain, expected)
    where: dict[str, Any] = {"state": state, "subgroup_bytes": subgroup_bytes, "small_bytes": 0}
    if state == "disk":
        where["path"] = tmp_path
    optimizer = OffloadedOptimizer(model.parameters(), kind, lr=0.05, **where)
    _train(model, optimizer)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert optimizer.param_groups[0]["count"] == expected.param_groups[0]["count"]
    states = zip(model.parameters(), plain.parameters(), strict=True)
    for mine, theirs in states:
        found = optimizer.state[mine] if kind in (_QuantizesLarge, _KeepsRows) else {}
        for name, value in found.items():
            assert value.dtype == expected.state[theirs][name].dtype
            assert torch.equal(value, expected.state[theirs][name])
    optimizer.close()
