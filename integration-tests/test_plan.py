"""What a plan says is what is then allocated and sent: computed without the model's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, record_traffic
from zero_engine import Plan, Precision
from zero_partition import memory_report

OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    **parity.OPTIMIZERS,
    "sgd-plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


class Mixed(nn.Module):
    """Tied, frozen, odd and bf16 parameters, and units of several sizes; all of it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(parity.VOCABULARY, parity.WIDTH)
        self.frozen = nn.Parameter(torch.randn(parity.WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(parity.Block() for _ in range(3))
        self.gates = nn.ModuleList(parity.Gate() for _ in range(2))
        self.lift = nn.Linear(parity.WIDTH, parity.WIDTH, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(parity.WIDTH, parity.VOCABULARY)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.linspace(-1, 1, 4)[:, None])

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens) + (self.positions + self.frozen).to(self.embed.weight.dtype)
        for part in (*self.blocks, *self.gates):
            x = part(x)
        return self.head(self.lift(x.to(self.lift.weight.dtype)).to(x.dtype)).float()


def _groups(model: nn.Module, name: str) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](parity.param_groups(model))


def _plan(make: Callable[[], nn.Module], name: str, config: ZeroConfig, **how: Any) -> Plan:
    """From a model that has no memory at all."""
    with torch.device("meta"):
        model = make()
    optimizer = _groups(model, name)
    return zero_engine.plan(model, config, optimizer=optimizer, device="cpu", **how)


# ---- Device residence ----


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_plan_is_what_the_memory_report_then_says(ranks, world_size: int) -> None:
    """A plan that is off by a buffer sends its reader to the wrong machine."""
    ranks(world_size).run(_compare_stages, timeout_s=60)


def _compare_stages(group: Group) -> None:
    for stage in parity.STAGES:
        for window in (1, 3) if stage == 3 else (3,):
            _compare(group, ZeroConfig(stage, window=window))
    if group.world_size > 1:
        _compare(parity.by_messages(), ZeroConfig(3, window=2))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_any_optimizers_state_is_planned(ranks, name: str) -> None:
    """What it keeps is asked of the optimizer itself, so one that nobody knows is planned too."""
    ranks(2).run(_compare_optimizer, name=name)


def _compare_optimizer(group: Group, name: str) -> None:
    for stage in (0, 2, 3):
        _compare(group, ZeroConfig(stage), name=name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_masters_and_other_dtypes_are_planned(ranks, world_size: int) -> None:
    """Masters are most of the memory of a model in bf16."""
    ranks(world_size).run(_compare_precision)


def _compare_precision(group: Group) -> None:
    for stage in (1, 2, 3):
        for precision in (
            Precision(params=torch.bfloat16),
            Precision(params=torch.bfloat16, reduce=torch.float32),
            Precision(params=torch.bfloat16, masters=None),
        ):
            _compare(group, ZeroConfig(stage, precision=precision))


def test_small_parameters_limits_and_cuts_are_planned(ranks) -> None:
    """Every setting that moves a byte moves it in the plan."""
    ranks(2).run(_compare_settings)


def _compare_settings(group: Group) -> None:
    for settings in (
        {"small_param_numel": 13},
        {"small_param_numel": 40, "max_small_numel": 60},
        {"max_live_numel": 400},
        {"max_live_numel": 4000, "prefetch_numel": 100, "max_reuse_numel": 1000},
        {"cut": "row"},
        {"cut": "tensor"},
        {"units": ["blocks.1", "blocks.0"]},
        {"units": []},
    ):
        for on in (group, parity.by_messages()):
            _compare(on, ZeroConfig(3, **settings))


def _compare(group: Group, config: ZeroConfig, *, name: str = "adamw") -> None:
    """Train a real one for some steps, and compare with the plan at each moment."""
    plan = _plan(
        Mixed,
        name,
        config,
        world_size=group.world_size,
        rank=group.rank,
        reads_peers=group.peers is not None,
    )
    what = f"{config}, {name}, rank {group.rank}"
    with parity.counting_from_here():
        model = parity.build(Mixed)
        optimizer = _groups(model, name)
        zero_engine.shard(model, optimizer, config, group=group)
        parity.run_steps(model, optimizer, range(3), rank=group.rank)

        _assert_equal(memory_report(model), plan.at_rest, what)
        assert _live_bytes(model) == plan.at_rest.total_bytes, what

        with record_traffic(group) as traffic:
            parity.loss_of(model, parity.batch(3, 0, group.rank)).backward()
            _assert_equal(memory_report(model), plan.memory.before_step, f"{what}, before the step")
            optimizer.step()
        optimizer.zero_grad()
        assert _sent(traffic) == _planned(plan), what
        del model, optimizer


def _assert_equal(report: Any, planned: Any, what: str) -> None:
    found, expected = attrs.asdict(report), attrs.asdict(planned)
    different = {key: (found[key], expected[key]) for key in found if found[key] != expected[key]}
    assert not different, f"{what}: (allocated, planned) of what differs: {different}"


def _live_bytes(model: nn.Module) -> int:
    """Of all tensors that Python keeps alive, whoever counts them, without the model's buffers."""
    return parity.live_bytes() - sum(buffer.nbytes for buffer in model.buffers())


def _sent(traffic: Any) -> dict[str, tuple[int, int, int, int]]:
    return {
        name: (of.calls, of.payload_numel, of.payload_bytes, of.padding_bytes)
        for name, of in traffic.operations.items()
        if name != "agree"
    }


def _planned(plan: Plan) -> dict[str, tuple[int, ...]]:
    sums: dict[str, list[int]] = {}
    for each in plan.traffic:
        total = sums.setdefault(each.name, [0, 0, 0, 0])
        total[0] += each.calls
        total[1] += each.payload_numel
        total[2] += each.payload_bytes
        total[3] += each.padding_bytes
    return {name: tuple(total) for name, total in sums.items()}
