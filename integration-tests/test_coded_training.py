"""Codecs in training: ranks agree to the last bit, and one process can say on what.

Four ranks are two nodes of two, or one of four.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coded
import parity
import pytest
import torch
import zero_engine
from one_dtype import OneDtype
from parity import Recipe, ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, parse_codec
from zero_engine import Offload, Precision, Wire

# ---- The same numbers as one process that encodes where we say ----

WIRES: dict[str, dict[str, Any]] = {
    "int8 weights": {"params": "int8"},
    "weights in small blocks": {"params": "int8:16"},
    "bf16 weights": {"params": "bf16"},
    "int4 gradients, one hop": {"gradients": "int4", "levels": 4},
    "int4 gradients, two hops": {"gradients": "int4", "levels": 2},
    "int4 gradients, one rank to a node": {"gradients": "int4", "levels": 1},
    "frozen ones rest in int8": {"frozen": "int8"},
    "frozen ones rest in another": {"frozen": "int8:8", "params": "int4"},
    "both": {"params": "int8", "gradients": "int4:32", "levels": 2},
    "replicas": {"params": "int8:16", "gradients": "int8:32", "levels": 2, "replicas": True},
    "replicas, weights": {"params": "int4:8", "levels": 2, "replicas": True},
    "replicas, gradients": {"gradients": "int4:16", "levels": 2, "replicas": True},
}
CODECS = ("params", "gradients", "frozen")


def half_frozen() -> nn.Module:
    """Two blocks of three, the embedding and the adapter's base do not train."""
    model = parity.Tiny()
    for part in (model.embed, *model.blocks[:2], model.lift):
        part.requires_grad_(False)
    return model


@pytest.mark.parametrize("wire", WIRES)
def test_one_process_that_encodes_gets_the_same_bits(ranks, wire: str) -> None:
    """What is lost is known: nothing else is, and nothing twice."""
    ranks(4).run(_equals_the_oracle, settings=WIRES[wire], timeout_s=60)


@pytest.mark.parametrize("wire", ["int8 weights", "both", "replicas"])
def test_masters_are_rounded_once_and_then_encoded(ranks, wire: str) -> None:
    """A model in bf16 is what codecs are used for, and its masters are in no file but exact."""
    ranks(4).run(_equals_the_oracle, settings=WIRES[wire], dtype=torch.bfloat16, timeout_s=60)


def _equals_the_oracle(
    group: Group, settings: dict[str, Any], dtype: torch.dtype | None = None
) -> None:
    make = OneDtype if dtype is not None else parity.Tiny
    recipe = Recipe(make=half_frozen if "frozen" in settings else make)
    codecs = {name: parse_codec(settings[name]) for name in CODECS if name in settings}
    how = {
        "ranks_per_node": settings.get("levels", 4),
        "replicas": settings.get("replicas", False),
        "dtype": dtype,
    }
    precision = None if dtype is None else Precision(params=dtype)
    expected: list[parity.Curve] = []
    for stage in (3,) if "frozen" in settings else (3, 2, 1):
        if not expected or (stage == 2 and "params" in settings):  # frozen ones are not gathered
            expected = coded.train_coded(recipe, stage=stage, **codecs, **how)
        config = ZeroConfig(stage, wire=Wire(**settings), precision=precision)
        found = parity.train_sharded(group, recipe, config)
        assert found.losses == expected[group.rank].losses, stage
        if group.rank == 0:
            parity.assert_same_weights(found.weights, expected[0].weights, what=f"stage {stage}")


OPTIONS: dict[str, dict[str, Any]] = {
    "no window": {"window": 1, "prefetch_numel": 0},
    "secondary": {"window": 1, "wire": {"secondary": True}},
    "shards on the disk": {"offload": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_other_choices_change_no_bit(ranks, option: str, tmp_path: Path) -> None:
    """A node's copy, shards elsewhere, and slots that are reused hold what was decoded."""
    ranks(4).run(_choices_agree, option=option, folder=tmp_path)


def _choices_agree(group: Group, option: str, folder: Path) -> None:
    recipe = Recipe(make=parity.tiny_float32, num_steps=2)
    settings: dict[str, Any] = {"params": "int8", "gradients": "int8", "levels": 2}
    more = dict(OPTIONS[option])
    if "offload" in more:
        more["offload"] = Offload(params="disk", path=folder)
    changed = settings | more.pop("wire", {})
    expected = parity.train_sharded(group, recipe, ZeroConfig(3, wire=Wire(**settings)))
    found = parity.train_sharded(group, recipe, ZeroConfig(3, wire=Wire(**changed), **more))

    assert found.losses == expected.losses
    if group.rank == 0:
        parity.assert_same_weights(found.weights, expected.weights, what=option)


EVERY = Wire(params="int8", gradients="int4", levels=2, loco=zero_engine.Loco())
EQUAL: dict[str, tuple[Wire, dict[str, Any]]] = {
    "all at once": (EVERY, {"window": 1}),
    "replicas": (Wire(params="int8", gradients="int8", levels=2, replicas=True), {}),
    "bf16 with masters": (
        EVERY,
        {"precision": Precision(params=torch.bfloat16), "make": OneDtype},
    ),
}


@pytest.mark.parametrize("how", EQUAL)
def test_all_ranks_compute_with_equal_weights(ranks, how: str) -> None:
    """Ranks whose weights differ in the last bit are different models; nothing compares them."""
    seen = ranks(4).run(_weights_in_forward, how=how)

    for step in zip(*seen, strict=True):
        for name, value in step[0].items():
            for other in step[1:]:
                assert torch.equal(other[name], value), name


def _weights_in_forward(group: Group, how: str) -> list[dict[str, Tensor]]:
    wire, options = EQUAL[how]
    make = options.get("make", parity.Tiny)
    options = {name: value for name, value in options.items() if name != "make"}
    config = ZeroConfig(3, wire=wire, **options)
    model, optimizer = parity.build_sharded(group, config, make=make)
    seen: list[dict[str, Tensor]] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            own = module.named_parameters(name, recurse=False)
            seen[-1].update({key: param.detach().clone() for key, param in own})

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(look(name))
    for step in range(3):
        seen.append({})
        parity.run_steps(model, optimizer, [step], rank=group.rank)
    return seen


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


def test_a_use_outside_the_unit_sees_the_same_values(ranks) -> None:
    """Else a tied weight would be two weights."""
    ranks(4).run(_use_outside)


def _use_outside(group: Group) -> None:
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

    assert torch.equal(model.seen, inside[0])
    assert not torch.equal(model.seen, exact)
    assert torch.equal(zero_engine.full_param(model.first.up.weight), exact)  # by request: exact
