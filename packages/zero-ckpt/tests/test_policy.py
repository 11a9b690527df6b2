"""Policies: what they choose, and how they say that there is nothing to choose."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_ckpt import (
    MATMULS,
    CheckpointError,
    ModulePolicy,
    OperatorCall,
    by_name,
    by_operator,
    by_type,
    every_nth,
    inside,
)

aten = torch.ops.aten
LAYERS = [f"layers.{i}" for i in range(5)]


def _call(operator: torch._ops.OpOverload) -> OperatorCall:
    return OperatorCall(operator, (), {}, torch.empty(0), 0)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(5))
        self.head = nn.Linear(2, 2)


def _selected(policy: ModulePolicy) -> list[str]:
    return list(policy(dict(_Model().named_modules())))


# ---- Over operators ----


def test_an_operator_has_many_names() -> None:
    """Profiles, schemas and code each write it in another way. An overload is itself alone."""
    names = ("mm", "aten.mm", "aten::mm", aten.mm, aten.mm.default)
    for policy in (*map(by_operator, names), by_operator("bmm", aten.mm), MATMULS):
        assert policy(_call(aten.mm.default))
        assert not policy(_call(aten.add.Tensor))

    assert not by_operator(aten.mm.default)(_call(aten.mm.dtype))


def test_every_kind_of_attention_that_torch_has_is_a_matmul() -> None:
    """Which of them runs depends on the device, and the policy must not."""
    starts = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward")
    fused = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(tuple(f"aten::{start}" for start in starts))
        and "backward" not in name
        and "." not in name
    }
    composite = {"_scaled_dot_product_attention_math"}

    for name in {*fused, "convolution", "addmm", "bmm", "baddbmm"} - composite:
        operator = getattr(aten, name).default
        assert MATMULS(_call(operator)) != operator._schema.is_mutable, name


# ---- Over modules ----


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (by_name("layers.*"), LAYERS),
        (by_name("layers.[02]"), ["layers.0", "layers.2"]),
        (by_name("head", "layers.1.att*"), ["layers.1.attention", "head"]),
        (by_name("**.0"), ["layers.0", *(f"layers.{i}.mlp.0" for i in range(5))]),
        (by_name("**.layers.0.**.0"), ["layers.0.mlp.0"]),
        (by_name(""), [""]),
        (by_type(_Layer), LAYERS),
        (by_type(nn.ModuleList, _Model), ["", "layers"]),
        (every_nth(2, by_type(_Layer)), ["layers.0", "layers.2", "layers.4"]),
        (every_nth(3, by_type(_Layer)), ["layers.0", "layers.3"]),
        (every_nth(2, every_nth(2, by_type(_Layer))), ["layers.0", "layers.4"]),
        (every_nth(3, lambda modules: list(modules)[2:6]), ["layers.0", "layers.0.mlp.0"]),
    ],
)  # fmt: skip
def test_modules_are_selected_in_the_models_order(
    policy: ModulePolicy, expected: list[str]
) -> None:
    """A star stays between two dots: "layers.*" are the layers, not all that is in them."""
    assert _selected(policy) == expected


def test_selecting_nothing_lists_what_there_is() -> None:
    """A renamed layer must not end in a training run that checkpoints nothing."""
    with pytest.raises(CheckpointError, match=r"'layers.0' \(_Layer\).*and 3 more") as caught:
        inside(_Model(), by_name("blocks.*"))
    assert "blocks.*" in str(caught.value)
