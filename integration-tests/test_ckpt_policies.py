"""Selective recomputation inside sharded training: what is kept, and modules that were selected."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import parity
import pytest
import torch
import training
import zero_engine
from attrs import frozen
from parity import ZeroConfig
from torch import Tensor, nn
from zero_ckpt import (
    MATMULS,
    Checkpointer,
    ModulePolicy,
    OperatorCall,
    by_name,
    by_type,
    checkpoint_modules,
    every_nth,
    inside,
    within_bytes,
)
from zero_comm import Group

pytestmark = pytest.mark.xdist_group("ranks")

DIM = 12


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(0.25)
        self.attention = nn.MultiheadAttention(DIM, 2, dropout=0.2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 24), nn.GELU(), nn.Linear(24, DIM))
        self.into, self.out = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        y = self.norm(x)
        y = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return y + self.drop(self.mlp(y)) + self.out(self.into(y))


class _Model(nn.Module):
    """A frozen base and trained adapters if `is_lora`; an embedding that is tied."""

    def __init__(self, *, is_lora: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, DIM)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        if is_lora:
            for name, param in self.named_parameters():
                param.requires_grad_(".into." in name or ".out." in name)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, mask=mask)
        return x @ self.embed.weight.T


def _everything(call: OperatorCall) -> bool:
    return True


@frozen
class _Case:
    policy: ModulePolicy
    keeps: Any = None
    inside: ModulePolicy | None = None

    def apply(self, model: nn.Module) -> None:
        keeps = self.keeps if self.inside is None else inside(model, self.inside)
        checkpoint_modules(model, self.policy, checkpointer=Checkpointer(keeps=keeps))


BLOCKS = by_type(_Block)
CASES = {
    "blocks": _Case(BLOCKS),
    "nested": _Case(by_name("blocks.*", "blocks.*.mlp"), MATMULS),
    "every second, matmuls": _Case(every_nth(2, BLOCKS), MATMULS),
    "budget": _Case(BLOCKS, within_bytes(2000, MATMULS)),
    "everything": _Case(BLOCKS, _everything),
    "model": _Case(by_name(""), _everything),
    "model and blocks": _Case(by_name("", "blocks.*"), _everything),
    "attention": _Case(BLOCKS, inside=by_name("blocks.*.attention")),
}


def _train(
    group: Group,
    config: ZeroConfig,
    case: _Case | None,
    order: Literal["before", "after"],
    *,
    is_lora: bool,
) -> Any:
    torch.manual_seed(0)
    model = _Model(is_lora=is_lora)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    if case is not None and order == "before":
        case.apply(model)
    zero_engine.shard(model, optimizer, config, group=group)
    if case is not None and order == "after":
        case.apply(model)
    losses = training.train(
        model, optimizer, partial(training.token_loss, rank=group.rank), num_steps=2
    )
    return losses, torch.get_rng_state(), zero_engine.full_state_dict(model)


@pytest.mark.parametrize("is_lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("stage", [1, 3])
def test_selected_modules_of_a_sharded_model_train_the_same(
    group: Group, stage: int, is_lora: bool
) -> None:
    """Units are gathered between the operators that are kept, and not twice in the same order."""
    losses, state, weights = _train(group, ZeroConfig(stage), None, "before", is_lora=is_lora)
    for index, (name, case) in enumerate(CASES.items()):
        for order in ("before", "after") if index == 0 else (("before", "after")[index % 2],):
            found_losses, found_state, found = _train(
                group, ZeroConfig(stage), case, order, is_lora=is_lora
            )

            assert found_losses == losses, (name, order)
            assert torch.equal(found_state, state), (name, order)
            if group.rank == 0:
                parity.assert_same_weights(found, weights, what=f"{name}, applied {order}")
