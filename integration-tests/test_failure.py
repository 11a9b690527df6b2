"""Bad input ends within seconds: what was expected, what came, on which rank, and what to do."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import AgreementError, CommError, Group
from zero_engine import ConfigError
from zero_engine.checks import say_alone
from zero_partition import PartitionError, StateError

SOON_S = 10.0


# ---- Configuration: no rank is needed to know ----


@pytest.mark.parametrize("stage", [7, -1, True, "3", 3.0, None])
def test_a_stage_that_does_not_exist_is_refused(stage: Any) -> None:
    """`True` would be stage 1, and "3" would compare unequal to everything."""
    with pytest.raises(ConfigError, match=r"ZeroConfig\.stage: expected 0, 1, 2 or 3, got .*"):
        ZeroConfig(stage)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"ZeroConfig\.window: expected int of at least 1, got 0"),
        ({"window": True}, r"ZeroConfig\.window: expected int"),
        ({"window": 2.5}, r"ZeroConfig\.window: expected int"),
        ({"max_unit_bytes": "1GB"}, r"ZeroConfig\.max_unit_bytes: expected int.*'1GB'"),
        ({"timeout_s": 0}, r"ZeroConfig\.timeout_s: expected int or float of at least 0\.001"),
        ({"units": "blocks.0"}, r"ZeroConfig\.units: expected module names.*'blocks\.0'"),
        ({"units": (1, 2)}, r"ZeroConfig\.units: expected module names"),
        ({"state_dict": "full"}, r"state_dict: expected 'names' or 'gather', got 'full'"),
        (
            {"offload": "cpu"},
            r"expected Offload or None, such as Offload\(optimizer='host'",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_makes_no_sense_is_refused(options: dict, message: str) -> None:
    """When it is made, not in the middle of a run."""
    with pytest.raises(ConfigError, match=message):
        ZeroConfig(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(2, 2), None, 3), r"expected config to be a ZeroConfig, got 3; call shard"),
        (
            (nn.Linear(2, 2), None, {"stage": 3}),
            r"expected config .*got {'stage': 3}; call shard\(.*ZeroConfig.from_deepspeed\(\)",
        ),
        (
            ([nn.Linear(2, 2)], None, None),
            r"expected model to be a Module, got \[Linear\(.*\)\]; call",
        ),
        ((nn.Linear(2, 2), "adam", None), r"expected optimizer .*got 'adam'; call"),
        (
            (nn.Linear(2, 2), [nn.Parameter(torch.ones(1))], None),
            r"(?s)expected optimizer .*of type list",
        ),
    ],
    ids=["int", "dict", "list-of-models", "name", "parameters"],
)
def test_arguments_of_the_wrong_type_are_refused(arguments: tuple, message: str) -> None:
    """In any order of mistakes, the first thing said is what was expected."""
    with pytest.raises(ConfigError, match=message):
        zero_engine.shard(*arguments)


def test_a_setting_that_is_given_to_shard_itself_is_refused_with_the_call_that_works() -> None:
    """It looks like an option of `shard`, and the whole call can be said."""
    with pytest.raises(ConfigError, match=r"got stage=3; .*optimizer, ZeroConfig\(stage"):
        zero_engine.shard(nn.Linear(2, 2), None, stage=3)  # type: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("num_devices", "launched", "is_said"), [(8, None, True), (1, None, False), (8, "1", False)]
)
def test_a_process_that_trains_alone_beside_further_devices_says_so(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, launched: str | None, is_said: bool
) -> None:
    """Whoever forgot torchrun would train on one of eight devices, in silence."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched is not None:
        monkeypatch.setenv("WORLD_SIZE", launched)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        say_alone(torch.device("cuda", 0))

    assert ["torchrun --nproc-per-node 8" in str(each.message) for each in said] == [True] * is_said


def test_a_model_on_the_meta_device_is_named_without_a_group_too() -> None:
    """Its device is no accelerator to count, and has no values to shard."""
    with torch.device("meta"), pytest.raises(PartitionError, match=r"'weight' is on the meta dev"):
        zero_engine.shard(nn.Linear(2, 2))


@pytest.mark.parametrize(("world_size", "is_refused"), [("2", True), ("1", False), ("two", False)])
def test_a_group_of_one_among_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, world_size: str, is_refused: bool
) -> None:
    """Each process would train by itself, unsharded, and nobody would know."""
    monkeypatch.setenv("WORLD_SIZE", world_size)
    model = nn.Linear(2, 2)
    if is_refused:
        with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 processes.*zero_comm\.init\(\)"):
            zero_engine.shard(model)
    else:
        zero_engine.shard(model)


# ---- Models and optimizers that cannot be sharded: every rank says so by itself ----


def _foreign_parameter(group: Group) -> None:
    model = parity.build()
    zero_engine.shard(model, parity.adamw(nn.Linear(3, 4)), ZeroConfig(3), group=group)


def _inside_of_another(group: Group) -> None:
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    zero_engine.shard(nn.Sequential(model), None, ZeroConfig(3), group=group)


def _expanded(group: Group) -> None:
    model = parity.build()
    up = model.blocks[0].up
    up.weight.data = torch.zeros(13, 1).expand(13, 6)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)


def _sparse(group: Group) -> None:
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.eye(3).to_sparse())
    zero_engine.shard(model, None, ZeroConfig(3), group=group)


def _meta(group: Group) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)


def _one_storage(group: Group) -> None:
    model = parity.build()
    model.blocks[1].up.weight = nn.Parameter(model.blocks[0].up.weight.data)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)


def _lbfgs(group: Group) -> None:
    model = nn.Linear(2, 2)
    zero_engine.shard(model, torch.optim.LBFGS(model.parameters()), ZeroConfig(3), group=group)


class _Fused(torch.optim.SGD):
    """As LOMO: parameters change while backward runs."""

    def fused_backward(self, loss: Any, lr: float) -> None:
        loss.backward()


def _within_backward(group: Group) -> None:
    model = nn.Linear(2, 2)
    zero_engine.shard(model, _Fused(model.parameters(), lr=0.1), ZeroConfig(0), group=group)


def _unit_is_no_module(group: Group) -> None:
    zero_engine.shard(parity.build(), None, ZeroConfig(3, units=["layers.0"]), group=group)


def _unit_has_no_forward(group: Group) -> None:
    zero_engine.shard(parity.build(), None, ZeroConfig(3, units=["blocks"]), group=group)


def _matrix_state(group: Group) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["preconditioner"] = torch.eye(3)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)


REFUSED: dict[Callable[[Group], None], str] = {
    _foreign_parameter: (
        r"param group 0 of the AdamW: parameter 0 of shape \(4, 3\) is not in.*given\. Build"
    ),
    _inside_of_another: r"this Sequential, or a module inside it, is sharded already",
    _expanded: r"up\.weight': expected memory for each.*\(1, 0\), as expand\(\) makes it; assign",
    _sparse: r"'mask': expected a dense tensor, got layout torch\.sparse_coo; convert it",
    _meta: r"parameter 'weight' is on the meta device.*materialise\(model, init",
    _one_storage: r"'blocks\.0\.up\.weight' and 'blocks\.1\.up\.weight' are different Param",
    _lbfgs: r"LBFGS keeps parameters in its attribute '_params'.*use an elementwise",
    _within_backward: r"_Fused updates parameters within backward.*Offload\(optimizer='host'",
    _unit_is_no_module: r"unit 'layers\.0': the model has no module of this name; see model\.named",
    _unit_has_no_forward: r"unit 'blocks': a ModuleList has no forward.*name the modules inside it",
    _matrix_state: r"'weight': optimizer state 'preconditioner' has shape \(3, 3\), expected",
}


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.__name__.strip("_"))
@pytest.mark.ranks(timeout_s=SOON_S)
def test_what_cannot_be_sharded_is_named(group: Group, mistake: Callable[[Group], None]) -> None:
    """Every rank sees the same mistake, so every rank raises, and none waits."""
    with pytest.raises(PartitionError, match=REFUSED[mistake]):
        mistake(group)


@pytest.mark.ranks(timeout_s=SOON_S)
def test_a_sparse_gradient_is_refused_where_it_arrives(group: Group) -> None:
    """Whether an embedding makes sparse gradients is not known before."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(2), group=group)

    with pytest.raises(StateError, match=r"'0\.weight': expected a dense gradient.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_functions_refuse_a_model_that_is_not_sharded() -> None:
    """A wrapped or rebuilt model is a common mistake."""
    model = nn.Linear(2, 2)

    for function in (
        zero_engine.full_state_dict,
        zero_engine.release_buffers,
        lambda model: zero_engine.clip_grad_norm_(model, 1.0),
        lambda model: zero_engine.no_sync(model).__enter__(),
    ):
        with pytest.raises(StateError, match=r"got a Linear that was not; call zero_engine\.shard"):
            function(model)


# ---- Ranks that do not agree ----


def _another_width(group: Group) -> None:
    model = nn.Sequential(nn.Linear(3, 4 + group.rank // 2), nn.ReLU())
    zero_engine.shard(model, None, ZeroConfig(3), group=group)


def _one_more_layer(group: Group) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 + group.rank // 2)))
    zero_engine.shard(model, None, ZeroConfig(3), group=group)


def _another_dtype(group: Group) -> None:
    model = nn.Linear(3, 3, dtype=torch.float32 if group.rank < 2 else torch.bfloat16)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)


def _frozen_on_one(group: Group) -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(group.rank < 2)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)


def _another_stage(group: Group) -> None:
    zero_engine.shard(nn.Linear(3, 3), None, ZeroConfig(1 if group.rank < 2 else 3), group=group)


def _another_window(group: Group) -> None:
    config = ZeroConfig(3, window=2 if group.rank < 2 else 3)
    zero_engine.shard(nn.Linear(3, 3), None, config, group=group)


def _another_optimizer(group: Group) -> None:
    model = nn.Linear(3, 3)
    make = torch.optim.AdamW if group.rank < 2 else torch.optim.SGD
    zero_engine.shard(model, make(model.parameters(), lr=0.1), ZeroConfig(3), group=group)


def _another_weight_decay(group: Group) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1 if group.rank < 2 else 0.2)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)


DISAGREEMENTS: dict[Callable[[Group], None], str] = {
    _another_width: (
        r"parameter '0\.weight': rank 0 has shape \(4, 3\), rank 2 has shape \(5, 3\) \(seen"
    ),
    _one_more_layer: r"only rank 2 has parameter '2\.weight'|rank 2 has parameter '2\.weight'",
    _another_dtype: r"parameter 'weight': rank 0 has .*float32.*rank 2 has .*bfloat16",
    _frozen_on_one: r"parameter 'bias': rank 0 has .*trainable.*rank 2 has .*frozen",
    _another_stage: r"the stage: rank 0 has 1 \(sharded: opt.* state\), rank 2 has 3 \(sharded: ",
    _another_window: r"window: rank 0 has 2, rank 2 has 3",
    _another_optimizer: r"optimizer: rank 0 has AdamW, rank 2 has SGD",
    _another_weight_decay: r"weight_decay: rank 0 has 0\.1, rank 2 has 0\.2",
}


@pytest.mark.parametrize("mistake", DISAGREEMENTS, ids=lambda mistake: mistake.__name__.strip("_"))
@pytest.mark.ranks(4, timeout_s=SOON_S)
def test_what_ranks_disagree_on_is_named_on_all_of_them(
    group: Group, mistake: Callable[[Group], None]
) -> None:
    """The rank whose log is read first is often not the one that is wrong."""
    message = rf"(?s)ranks disagree.*{DISAGREEMENTS[mistake]}.*rank {group.rank}\)"

    with pytest.raises(AgreementError, match=message):
        mistake(group)


@pytest.mark.slow
@pytest.mark.ranks(4, timeout_s=SOON_S)
def test_a_rank_that_does_not_come_is_missed_in_time(group: Group) -> None:
    """The others must not wait for the backend's own timeout, which is ten minutes or more."""
    if group.rank == group.world_size - 1:
        time.sleep(4.0)  # alive, busy with something else
        return
    began = time.monotonic()

    says = r"from rank 3.*did not finish within 2 s(?s:.*)leaves them waiting"
    with pytest.raises(CommError, match=says):
        zero_engine.shard(nn.Linear(3, 3), None, ZeroConfig(3, timeout_s=2), group=group)
    assert time.monotonic() - began < 2 * SOON_S


@pytest.mark.cpu_only("on a device ranks compare their launches first, and wait for all there")
@pytest.mark.parametrize(("sleeps", "words"), [(0, "did not begin"), (1, "did not finish")])
@pytest.mark.ranks(timeout_s=SOON_S)
def test_a_failed_gather_is_told_once(group: Group, sleeps: int, words: str) -> None:
    """Python prints the causes of an error before it: it has none, and names the backend's."""
    messages = group.by_messages("this test asks for it")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero_engine.shard(model, None, ZeroConfig(3), group=messages)
    if group.rank == sleeps:  # rank 1 ends before rank 0 begins, or after
        time.sleep(1.0)
    if group.rank == 1:
        dist.destroy_process_group()
        return

    says = rf"(?s)^full_state_dict\(\): gathering unit .*{words}.*backend's own error"
    with pytest.raises(CommError, match=says) as raised:
        zero_engine.full_state_dict(model)
    assert "".join(traceback.format_exception(raised.value)).count("Error: ") == 1


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.head(self.experts[chosen](self.experts[0](x))).sum()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.ranks(timeout_s=5.0)
def test_ranks_that_use_different_units_train(group: Group, stage: int) -> None:
    """A data-dependent expert: design promise 3 says it works, or an error names the parameter."""
    model = parity.build(_Experts)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    for _ in range(2):
        model(torch.ones(1, 4), 1 + group.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
