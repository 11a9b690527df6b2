"""Recomputation inside sharded training: it gathers units again, and draws the same masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import training
import zero_engine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_ckpt import (
    MATMULS,
    Checkpointer,
    ModulePolicy,
    OperatorCall,
    OperatorPolicy,
    PackedSaver,
    RngTracker,
    by_name,
    by_type,
    checkpoint_modules,
    every_nth,
    inside,
    within_bytes,
)
from zero_comm import Group, Handle, all_reduce_flat
from zero_comm.testing import assert_close
from zero_engine import Precision
from zero_partition.run import gradients

DIM = 12


class _Block(nn.Module):
    """Attention and an MLP, each rank with a dropout mask of its own inside the latter."""

    def __init__(self, tracker: RngTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(0.25)
        self.attention = nn.MultiheadAttention(DIM, 2, dropout=0.2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 24), nn.GELU(), nn.Linear(24, DIM))
        self.into, self.out = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        y = self.norm(x)
        y = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        with self.tracker.fork():
            hidden = self.drop(self.mlp(y))
        return y + self.drop(hidden) + self.out(self.into(y))


class _Model(nn.Module):
    """An embedding that is tied and a block that comes twice; a frozen base if `is_lora`."""

    def __init__(self, tracker: RngTracker, *, is_lora: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, DIM)
        self.blocks = nn.ModuleList(_Block(tracker) for _ in range(4))
        if is_lora:
            for name, param in self.named_parameters():
                param.requires_grad_(".into." in name or ".out." in name)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, mask=mask)
        return x @ self.embed.weight.T


def _everything(call: OperatorCall) -> bool:
    return True


Apply = Callable[[nn.Module, RngTracker], Any]


def _checkpointed(policy: ModulePolicy, keeps: OperatorPolicy | None = None) -> Apply:
    return lambda model, tracker: checkpoint_modules(
        model, policy, checkpointer=Checkpointer(tracker=tracker, keeps=keeps)
    )


def _keeping_inside(model: nn.Module, tracker: RngTracker) -> None:
    attention = inside(model, by_name("blocks.*.attention"))
    _checkpointed(BLOCKS, attention)(model, tracker)


BLOCKS = by_type(_Block)
CASES: dict[str, Apply] = {
    "blocks": _checkpointed(BLOCKS),
    "nested": _checkpointed(by_name("blocks.*", "blocks.*.mlp"), MATMULS),
    "every second, matmuls": _checkpointed(every_nth(2, BLOCKS), MATMULS),
    "budget": _checkpointed(BLOCKS, within_bytes(2000, MATMULS)),
    "everything": _checkpointed(BLOCKS, _everything),
    "model": _checkpointed(by_name(""), _everything),
    "model and blocks": _checkpointed(by_name("", "blocks.*"), _everything),
    "attention": _keeping_inside,
}


def _make(
    group: Group,
    config: zero_engine.ZeroConfig,
    *,
    is_lora: bool = False,
    before: Apply | None = None,
    after: Apply | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, RngTracker]:
    """Sharded, and checkpointed before or after that."""
    torch.manual_seed(0)
    tracker = RngTracker("cpu")
    tracker.add("model-parallel-rng", 100 + group.rank)
    model = _Model(tracker, is_lora=is_lora)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    if before is not None:
        before(model, tracker)
    zero_engine.shard(model, optimizer, config, group=group)
    if after is not None:
        after(model, tracker)
    return model, optimizer, tracker


def _train(
    group: Group, model: nn.Module, optimizer: torch.optim.Optimizer, tracker: RngTracker
) -> tuple[Any, dict[str, Tensor]]:
    """Losses and where all rngs are; the weights."""
    loss_of = partial(training.token_loss, rank=group.rank)
    losses = training.train(model, optimizer, loss_of, num_steps=2)
    states = [torch.get_rng_state(), *tracker.get_states().values()]
    return (losses, [state.tolist() for state in states]), zero_engine.full_state_dict(model)


@pytest.mark.parametrize(
    ("stage", "params", "is_lora"),
    [
        (0, None, True),
        (1, None, False),
        (1, torch.bfloat16, True),
        (2, None, True),
        (3, None, False),
        (3, None, True),
        (3, torch.bfloat16, False),  # rounded values are gathered into slots in another order
    ],
)
def test_a_sharded_model_trains_the_same_with_and_without(
    group: Group, stage: int, params: torch.dtype | None, is_lora: bool
) -> None:
    """Units are gathered between the operators that are kept, and not twice in the same order."""
    config = parity.ZeroConfig(stage, precision=Precision(params=params))
    numbers, weights = _train(group, *_make(group, config, is_lora=is_lora))
    for index, (name, apply) in enumerate(CASES.items()):
        if (stage, params) != (3, None) and index % 4 != stage:
            continue  # each with stage 3, and in turn another way
        for order in ("before", "after") if index == 0 else (("before", "after")[index % 2],):
            made = _make(group, config, is_lora=is_lora, **{order: apply})
            found_numbers, found = _train(group, *made)

            assert found_numbers == numbers, (name, order)
            if group.rank == 0:
                parity.assert_same_weights(found, weights, what=f"{name}, applied {order}")


def test_an_exception_in_the_second_run_leaves_the_model_usable(group: Group) -> None:
    """Units that were gathered for it have to be put down again."""
    expected, weights = _train(group, *_make(group, parity.ZeroConfig(3)))
    model, optimizer, tracker = _make(group, parity.ZeroConfig(3), after=CASES["blocks"])
    states, calls = tracker.get_states(), count(1)

    def fail(*_: Any) -> None:
        if next(calls) == 2:
            raise KeyError("in the middle")

    rng: Any = torch
    if group.device.type != "cpu":
        rng = torch.get_device_module(group.device)
    rng_state = rng.get_rng_state()
    with (
        model.blocks[2].mlp.register_forward_hook(fail),
        pytest.raises(KeyError, match="in the middle"),
    ):
        model(torch.arange(6)[None]).square().sum().backward()
    optimizer.zero_grad()
    rng.set_rng_state(rng_state)
    tracker.set_states(states)

    found, found_weights = _train(group, model, optimizer, tracker)

    assert found == expected
    if group.rank == 0:
        parity.assert_same_weights(found_weights, weights, what="after an exception")


# ---- Inputs as shards ----


def _normed_linears() -> nn.Module:
    layers = (
        nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9), nn.GELU(), nn.Dropout(0.2))
        for _ in range(4)
    )
    return nn.Sequential(*layers)


@pytest.mark.parametrize("num_slots", [None, 4])
def test_one_group_gathers_parameters_and_inputs(group: Group, num_slots: int | None) -> None:
    """Messages of the two must not be taken for each other, nor in another order."""
    savers = [PackedSaver(group=group, num_slots=num_slots) for _ in range(3)]
    unused = iter(savers)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        checkpointer = Checkpointer(saver=next(unused))
        checkpoint_modules(model, by_name("?"), checkpointer=checkpointer)
        torch.manual_seed(0)
        return training.train(
            model,
            optimizer,
            lambda model, step: model(torch.randn(5, 9)).square().sum(),
            num_steps=3,
        )

    configs = parity.ZeroConfig(1), parity.ZeroConfig(3)
    training.assert_trains_as_plain(group, _normed_linears, run, *configs)
    assert [saver.kept_bytes() for saver in savers] == [{}] * 3


def _chunk_loss(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(hidden @ weight.t(), ids, reduction="sum")


class _Chunked(nn.Module):
    """Takes its loss in chunks, whose logits are computed again: the weight is an argument."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.embed = nn.Embedding(20, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(DIM, 20, bias=False) for _ in range(2))

    def encode(self, ids: Tensor) -> Tensor:
        """Without the loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Each head's, and of one head through the embedding's weight."""
        weights = [*(head.weight for head in self.heads), self.embed.weight]
        chunks = zip(hidden.chunk(3), ids.chunk(3), strict=True)
        losses = [self.run(_chunk_loss, h, w, i) for h, i in chunks for w in weights]
        return sum(losses) / ids.numel()  # type: ignore[return-value]

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.encode(ids), ids)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["inside the model", "outside"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["kept", "packed"])
def test_a_weight_may_be_an_argument(group: Group, stage: int, where: str, is_packed: bool) -> None:
    """A detached copy of a parameter at rest was of its class, and not known to its unit."""
    checkpointer = Checkpointer(saver=PackedSaver()) if is_packed else Checkpointer()
    plain = parity.build(lambda: _Chunked(lambda function, *args: function(*args)))
    model = parity.build(lambda: _Chunked(checkpointer.checkpoint))
    its_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = parity.ZeroConfig(stage, min_unit_bytes=0, window=1)
    zero_engine.shard(model, optimizer, config, group=group)
    for step in range(3):
        ids = (torch.arange(12) * (step + 3)) % 20
        for each, by in ((plain, its_optimizer), (model, optimizer)):
            loss = each(ids) if where != "outside" else each.loss(each.encode(ids), ids)
            parity.finish_step(loss, by)
    training.assert_weights_of(model, plain, group=group, what=where)


class _Returns(nn.Module):
    """Comes back to its first block after each of the others."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[1:]:
            x = self.run(block, self.run(self.blocks[0], x).tanh()).tanh()
        return x.square().mean()


def test_what_autograd_adds_while_a_reduction_travels_is_not_lost(group: Group) -> None:
    """At stage 0 gradients are reduced where autograd leaves them, and come in several parts."""

    def reduced_late(values: Tensor, **how: Any) -> Handle[Tensor]:
        """What was there at the launch, written when somebody waits."""
        return all_reduce_flat(values.clone(), **how).map(values.copy_)

    plain = parity.build(lambda: _Returns(lambda function, x: function(x)))
    model = parity.build(lambda: _Returns(partial(checkpoint, use_reentrant=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, parity.ZeroConfig(0, min_unit_bytes=0), group=group)
    for step in range(3):  # the first shows the order in which units are reduced
        x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        plain(x).backward()
        optimizer.zero_grad()
        with mock.patch.object(gradients, "all_reduce_flat", reduced_late):
            model(x.requires_grad_()).backward()
        for param, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(param.grad, its.grad)
