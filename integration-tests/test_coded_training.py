"""Codecs in training: ranks agree to the last bit, and one process can say on what.

Four ranks are two nodes of two, or one of four.
"""

from __future__ import annotations

import random
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import coded
import parity
import pytest
import torch
import torch.nn.functional as F
import zero_engine
from one_dtype import OneDtype
from parity import Recipe, ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, all_gather_json, parse_codec
from zero_comm.testing import equal
from zero_engine import Loco, Offload, Precision, Wire

# ---- The same numbers as one process that encodes where we say ----

WIRES: dict[str, dict[str, Any]] = {
    "int8 weights": {"params": "int8"},
    "int4 gradients, one hop": {"gradients": "int4", "levels": 4},
    "int4 gradients, two hops": {"gradients": "int4", "levels": 2},
    "int4 gradients, one rank to a node": {"gradients": "int4", "levels": 1},
    "frozen ones rest in another": {"frozen": "int8:8", "params": "int4"},
    "frozen ones alone": {"frozen": "int8"},
    "replicas": {"params": "int8:16", "gradients": "int8:32", "levels": 2, "replicas": True},
    "both, of masters": {"params": "int8", "gradients": "int4:32", "levels": 2},
}
CODECS = ("params", "gradients", "frozen")


def half_frozen() -> nn.Module:
    """Two blocks of three, the embedding and the adapter's base do not train."""
    model = parity.Tiny()
    for part in (model.embed, *model.blocks[:2], model.lift):
        part.requires_grad_(False)
    return model


@pytest.mark.parametrize(("turn", "wire"), list(enumerate(WIRES)), ids=list(WIRES))
@pytest.mark.ranks(4, timeout_s=60)
def test_one_process_that_encodes_gets_the_same_bits(group: Group, turn: int, wire: str) -> None:
    """What is lost is known: nothing else is, and nothing twice."""
    settings = WIRES[wire]
    dtype = torch.bfloat16 if "masters" in wire else None
    make = half_frozen if "frozen" in settings else parity.Tiny if dtype is None else OneDtype
    recipe = Recipe(make=make)
    train_alone = partial(
        coded.train_coded,
        recipe,
        ranks_per_node=settings.get("levels", 4),
        replicas=settings.get("replicas", False),
        dtype=dtype,
        **{name: parse_codec(settings[name]) for name in CODECS if name in settings},
    )
    # At 1 and 2 parameters travel after the step, and frozen ones do not.
    for stage in (3,) if "frozen" in settings else (3, 1 + turn % 2):
        expected = parity.by_rank_0(group, partial(train_alone, stage=stage))
        precision = None if dtype is None else Precision(params=dtype)
        config = ZeroConfig(stage, wire=Wire(**settings), precision=precision)
        found = parity.train_sharded(group, recipe, config)
        assert found.losses == expected[group.rank].losses, stage
        if group.rank == 0:
            parity.assert_same_weights(found.weights, expected[0].weights, what=f"stage {stage}")


@pytest.mark.ranks(4)
def test_other_choices_change_no_bit(group: Group, tmp_path: Path) -> None:
    """A node's copy, shards elsewhere, and slots that are reused hold what was decoded."""
    recipe = Recipe(make=parity.tiny_float32, num_steps=2)
    wire = partial(Wire, params="int8", gradients="int8", levels=2)
    expected = parity.train_sharded(group, recipe, ZeroConfig(3, wire=wire()))
    for how, options in {
        "no window": {"window": 1, "prefetch_numel": 0, "wire": wire()},
        "secondary": {"window": 1, "wire": wire(secondary=True)},
        "disk": {"offload": Offload(params="disk", path=tmp_path), "wire": wire()},
    }.items():
        found = parity.train_sharded(group, recipe, ZeroConfig(3, **options))
        parity.assert_same(found, expected, rank=group.rank, what=how)


class Borrowed(nn.Module):
    """One unit uses the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parity.Block()
        self.second = parity.Block()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        inside = self.first(x)
        self.seen = self.first.up.weight @ torch.eye(parity.WIDTH)
        return self.second(inside) @ self.first.up.weight.T @ self.first.up.weight


@pytest.mark.ranks(4)
def test_a_use_outside_the_unit_sees_the_same_values(group: Group) -> None:
    """Else a tied weight would be two weights."""
    model = parity.build(Borrowed)
    exact = model.first.up.weight.detach().clone()
    inside: list[Tensor] = []
    model.first.up.register_forward_pre_hook(
        lambda module, _: inside.append(module.weight.detach().clone())
    )
    config = ZeroConfig(3, units=["first", "second"], window=1, wire=Wire(params="int4:8"))
    zero_engine.shard(model, None, config, group=group)
    with torch.no_grad():
        model(torch.ones(1, parity.WIDTH))

    assert equal(model.seen, inside[0])
    assert not equal(model.seen, exact)
    assert equal(zero_engine.full_param(model.first.up.weight), exact)  # by request: exact


# ---- The loss on real text, beside that of exact training ----


CONTEXT, NUM_STEPS, LAST = 8, 100, 20


def next_byte() -> nn.Module:
    """From those before it."""
    embed, hidden, out = nn.Embedding(256, 16), nn.Linear(CONTEXT * 16, 128), nn.Linear(128, 256)
    return nn.Sequential(embed, nn.Flatten(), hidden, nn.GELU(), out)


@pytest.mark.drawn(3)
@pytest.mark.slow
def test_a_hundred_steps_end_near_the_exact_ones(ranks) -> None:
    """What coarse gradients lose must not be lost for training; LoCo feeds it back."""
    exact, plain, loco = ranks(4).run(_train_all, timeout_s=120.0)[0]
    print(f"exact: {exact:.4f}, encoded: {plain:.4f}, with LoCo: {loco:.4f}")  # quoted in docs

    assert exact < 3.5  # it has learned: 5.5 is chance
    assert abs(plain / exact - 1) < 0.1
    assert abs(loco / exact - 1) < 0.02
    assert abs(loco - exact) < 0.75 * abs(plain - exact)


def _train_all(group: Group) -> list[float]:
    """The mean losses of the last steps."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = b"".join(module.read_bytes() for module in modules)
    encoded = {"params": "int8", "gradients": "int4", "levels": 2}
    found = []
    for wire in (Wire(), Wire(**encoded), Wire(**encoded, loco=Loco())):
        model = parity.build(next_byte)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(3, wire=wire), group=group)
        losses = []
        for step in range(NUM_STEPS):
            rng = random.Random(f"{step}/{group.rank}")
            starts = [rng.randrange(len(text) - CONTEXT - 1) for _ in range(64)]
            tokens = torch.tensor([list(text[start : start + CONTEXT + 1]) for start in starts])
            loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, -1])
            losses.append(loss.item())
            parity.finish_step(loss, optimizer)
        every = all_gather_json(sum(losses[-LAST:]) / LAST, group=group)
        found.append(sum(every) / group.world_size)
    return found
