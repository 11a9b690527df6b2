"""Parameters that Init sharded, whole in a context before their model is sharded."""

from __future__ import annotations

import copy

import parity
import pytest
import torch
import zero_engine
from torch import nn
from zero_comm import Group
from zero_engine import GatheredParameters, ZeroConfig
from zero_partition import LostEditError, OverlapError, StateError

pytestmark = pytest.mark.xdist_group("ranks")


def _build(group: Group) -> tuple[nn.Module, nn.Module]:
    """A model of which each rank keeps a part, and the same in plain torch."""
    plain = parity.build(parity.tiny_float32)
    with zero_engine.Init(group=group):
        model = parity.build(parity.tiny_float32)
    return model, plain


def _assert_trains_from(model: nn.Module, plain: nn.Module, group: Group) -> None:
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    weights = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(weights, plain.state_dict(), what="after Init")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_are_read_between_init_and_shard(ranks, world_size: int) -> None:
    """DeepSpeed has its example of GatheredParameters there; stand-ins would be read as NaN."""
    ranks(world_size).run(_read)


def _read(group: Group) -> None:
    model, plain = _build(group)
    backwards = list(model.parameters())
    if group.rank:
        backwards.reverse()

    with GatheredParameters(backwards + backwards):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        data = parity.batch(0, 0, group.rank)
        assert parity.loss_of(model, data).item() == parity.loss_of(plain, data).item()
        assert list(model.state_dict()) == list(plain.state_dict())

    for param in model.parameters():
        assert param.untyped_storage().nbytes() == param.element_size()
    with pytest.raises(StateError, match="was sharded by Init"):
        model(parity.batch(0, 0, group.rank)[0])
    _assert_trains_from(model, plain, group)


@pytest.mark.parametrize("modifier", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_writes_for_all_between_init_and_shard(
    ranks, world_size: int, modifier: int
) -> None:
    """So transformers initialises a model of stage 3, and scripts load old weights into one."""
    ranks(world_size).run(_write, modifier=modifier)


def _write(group: Group, modifier: int) -> None:
    model, plain = _build(group)
    generator = torch.Generator().manual_seed(5)
    for param in plain.parameters():
        nn.init.normal_(param, generator=generator)
    generator = torch.Generator().manual_seed(5 if group.rank == modifier else 6)
    params = list(model.parameters())

    with GatheredParameters(params[:1], modifier_rank=modifier):
        params[0].data = torch.randn(params[0].shape, generator=generator)  # in place of its memory
    for param in params[1:]:
        with GatheredParameters(param, modifier_rank=modifier):
            if group.rank == modifier:
                nn.init.normal_(param, generator=generator)

    copied = copy.deepcopy(model)
    _assert_trains_from(model, plain, group)
    _assert_trains_from(copied, plain, group)


@pytest.mark.parametrize("way", ["in place", "data", "replaced"])
def test_a_write_that_would_be_lost_raises_on_every_rank(ranks, way: str) -> None:
    """A model that kept its random weights trains, only worse."""
    ranks(2).run(_lose_edit, way=way)


def _lose_edit(group: Group, way: str) -> None:
    model, plain = _build(group)
    weight = model.blocks[0].up.weight
    with (
        pytest.raises(LostEditError, match=r"rank 1 changed parameter .*weight.*seen on rank"),
        GatheredParameters(weight, sanity_checks=way == "data"),
        torch.no_grad(),
    ):
        if group.rank == 1 and way == "in place":
            weight.add_(1)
        elif group.rank == 1 and way == "data":
            weight.data.add_(1)
        elif group.rank == 1:
            weight.data = torch.zeros_like(weight)
    _assert_trains_from(model, plain, group)


def test_an_exception_on_one_rank_ends_the_context_on_all(ranks) -> None:
    """Or the others would wait for it, and half of the model were of another file."""
    ranks(2).run(_raise_inside)


def _raise_inside(group: Group) -> None:
    model, plain = _build(group)
    expected = ValueError if group.rank == 1 else StateError
    with (
        pytest.raises(expected, match=r"my own|rank 1 left the context with an exception"),
        GatheredParameters(model, modifier_rank=0),
        torch.no_grad(),
    ):
        model.scale.fill_(7)
        if group.rank == 1:
            raise ValueError("my own")
    _assert_trains_from(model, plain, group)


def test_what_cannot_be_gathered_early_is_refused(ranks) -> None:
    """By the same names as for a model that is sharded."""
    ranks(2).run(_refuse)


def _refuse(group: Group) -> None:
    model, plain = _build(group)
    weight = model.blocks[0].up.weight
    with pytest.raises(StateError, match=r"modifier_rank in 0\.\.1, .*got 2"):
        GatheredParameters(weight, modifier_rank=2).__enter__()
    with (
        GatheredParameters(weight),
        pytest.raises(OverlapError, match="gathered already"),
        GatheredParameters(model),
    ):
        pass
    with (
        pytest.raises(StateError, match=r"rank 0 left parameter .* with another shape"),
        GatheredParameters(weight, modifier_rank=0),
    ):
        weight.data = torch.zeros(3)
    with zero_engine.Init(group=group), GatheredParameters(weight):  # which gathers by itself
        assert torch.equal(weight, plain.blocks[0].up.weight)
    _assert_trains_from(model, plain, group)
