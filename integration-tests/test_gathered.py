"""Parameters made whole on demand: what is read is right, what is written arrives or is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import parity
import pytest
import torch
import zero_engine
import zero_partition
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, record_traffic
from zero_engine import GatheredParameters, full_param, unsharded
from zero_partition import LostEditError, OverlapError, StateError

STAGES = parity.STAGES


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_param(param) for name, param in model.named_parameters()}


def _assert_equal(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert values.keys() == expected.keys()
    different = [name for name, value in values.items() if not torch.equal(value, expected[name])]
    assert not different, different


# ---- Reading ----


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_inside_every_parameter_is_whole_in_its_own_object(
    ranks, stage: int, world_size: int
) -> None:
    """One, some in any order and more than once, a generator, a module: users pass all of them."""
    ranks(world_size).run(_read_all_ways, stage=stage)


def _read_all_ways(group: Group, stage: int) -> None:
    plain = dict(parity.build().named_parameters())
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    up = model.blocks[1].up
    backwards = [*reversed(list(model.parameters())), model.embed.weight]
    cases = {
        "one": up.weight,
        "tied": model.head.weight,
        "frozen": model.frozen,
        "list": [up.bias, model.scale, up.weight, up.weight],
        "generator": (param for param in model.blocks[1].parameters()),
        "module": model,
        "backwards": backwards,
    }
    at_rest = {name: (param.data_ptr(), type(param)) for name, param in model.named_parameters()}
    for what, params in cases.items():
        with GatheredParameters(params):
            for name, param in model.named_parameters():
                if what in ("module", "backwards") or (what == "list" and param is up.bias):
                    assert torch.equal(param.data, plain[name]), (what, name)
                    assert torch.equal(param, plain[name]), (what, name)
                    assert str(param) == str(plain[name])
                    assert torch.equal(copy.deepcopy(param), plain[name])
        left = {name: (param.data_ptr(), type(param)) for name, param in model.named_parameters()}
        assert left == at_rest, what
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


def test_parameters_of_no_sharded_model_are_left_alone(ranks) -> None:
    """Libraries wrap every read in a gather, sharded or not."""
    ranks(2).run(_gather_plain)


def _gather_plain(group: Group) -> None:
    plain = nn.Linear(2, 2)
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    with GatheredParameters([plain.weight], modifier_rank=0), torch.no_grad():
        plain.weight.fill_(group.rank)
    assert (plain.weight == group.rank).all()
    with GatheredParameters(model.scale, enabled=False):
        assert not zero_partition.parameter_status(model.scale).is_whole
    with pytest.raises(TypeError, match="an iterable of Parameters, got a str"):
        GatheredParameters(["scale"])


@pytest.mark.parametrize("stage", STAGES)
def test_forward_and_backward_inside_are_those_outside(ranks, stage: int) -> None:
    """Also where only a part of a unit is gathered, and where backward runs after the end."""
    ranks(2).run(_train_inside, stage=stage)


def _train_inside(group: Group, stage: int) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    expected = parity.run_steps(model, optimizer, range(4), rank=group.rank)
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    losses = []
    for step in range(4):
        chosen = [model, model.blocks[1], [model.blocks[0].norm.weight, model.scale], model][step]
        with GatheredParameters(chosen):
            loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
            if step < 2:
                loss.backward()
        if step >= 2:
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    assert losses == expected


def test_backward_of_a_graph_made_before_is_refused_inside(ranks) -> None:
    """Its views point into slots that are not filled while a unit is whole elsewhere."""
    ranks(2).run(_backward_of_older_graph)


def _backward_of_older_graph(group: Group) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
    with GatheredParameters(model):
        pass  # between forward and backward: no harm
    with unsharded(model), pytest.raises(StateError, match="graph that was made before it"):
        loss.backward()
    optimizer.zero_grad()
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


# ---- Writing ----


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("modifier", [0, 1])
def test_the_modifiers_values_are_everyones(ranks, stage: int, modifier: int) -> None:
    """In place, through `data`, or by new memory: the three ways in which weights are set."""
    ranks(2).run(_modify, stage=stage, modifier=modifier)


def _modify(group: Group, stage: int, modifier: int) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    expected = _values(model)
    up, norm = model.blocks[0].up, model.blocks[2].norm
    with GatheredParameters([up.weight, up.bias, norm.weight, model.frozen], modifier):
        with torch.no_grad():
            up.weight.fill_(float(group.rank + 3))
        nn.init.constant_(up.bias, float(group.rank + 4))
        norm.weight.data.mul_(0).add_(group.rank + 5)
        model.frozen.data = torch.full((parity.WIDTH,), float(group.rank + 6))
    for offset, name in enumerate(
        ("blocks.0.up.weight", "blocks.0.up.bias", "blocks.2.norm.weight", "frozen")
    ):
        expected[name] = torch.full_like(expected[name], modifier + 3 + offset)

    _assert_equal(_values(model), expected)
    losses = parity.run_steps(model, optimizer, range(2), rank=group.rank)
    plain, plain_optimizer = parity.build_with_optimizer()
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(expected[name])
    plain_losses = parity.run_steps(
        parity.as_ddp(plain, group), plain_optimizer, range(2), rank=group.rank
    )
    assert losses == plain_losses


@pytest.mark.parametrize("editor", [0, 1])
@pytest.mark.parametrize("way", ["in-place", "new-memory", "data"])
def test_a_change_by_nobody_in_particular_raises_on_all_ranks(ranks, editor: int, way: str) -> None:
    """An error on the editing rank alone would leave the others waiting for it."""
    ranks(2).run(_edit_without_modifier, editor=editor, way=way)


def _edit_without_modifier(group: Group, editor: int, way: str) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    expected = _values(model)
    weight = model.blocks[1].up.weight
    with (
        pytest.raises(
            LostEditError, match=rf"rank {editor} changed parameter 'blocks\.1\.up\.weight'"
        ),
        GatheredParameters(model.blocks, sanity_checks=way == "data"),
    ):
        if group.rank == editor:
            match way:
                case "in-place":
                    with torch.no_grad():
                        weight.zero_()
                case "new-memory":
                    weight.data = torch.zeros_like(weight)
                case _:
                    weight.data.view(-1)[0] += 1

    _assert_equal(_values(model), expected)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


def test_a_change_that_is_not_looked_for_is_dropped(ranks) -> None:
    """Writes through `data` bump no counter; what they wrote must not outlive the context."""
    ranks(2).run(_edit_unseen)


def _edit_unseen(group: Group) -> None:
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    expected = _values(model)
    with GatheredParameters(model):
        for param in model.parameters():
            param.data.zero_()
    _assert_equal(_values(model), expected)


def test_a_modifier_that_changes_the_shape_is_named_on_all_ranks(ranks) -> None:
    """Shards have no room for more."""
    ranks(2).run(_misshape)


def _misshape(group: Group) -> None:
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    with (
        pytest.raises(StateError, match=r"rank 1 left parameter 'scale' with another shape"),
        GatheredParameters(model.scale, modifier_rank=1),
    ):
        if group.rank == 1:
            model.scale.data = torch.ones(2)
    assert full_param(model.scale).tolist() == [1.0]


def test_a_modifier_that_does_not_exist_is_refused(ranks) -> None:
    """Before anything is sent."""
    ranks(2).run(_bad_modifier)


def _bad_modifier(group: Group) -> None:
    model, _ = parity.build_sharded(group, ZeroConfig(2))
    with (
        pytest.raises(StateError, match=r"expected modifier_rank in 0\.\.1.*got 2"),
        GatheredParameters(model, modifier_rank=2),
    ):
        pass


# ---- Order ----


@pytest.mark.parametrize("modifier", [None, 0])
def test_overlapping_gathers_are_refused_and_disjoint_ones_nest(
    ranks, modifier: int | None
) -> None:
    """Two could not both have the last word; the refusal must leave no mark behind."""
    ranks(2).run(_overlap, modifier=modifier)


def _overlap(group: Group, modifier: int | None) -> None:
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    expected = _values(model)
    for _ in range(2):
        with GatheredParameters([model.blocks[0].up.weight, model.scale], modifier):
            with (
                pytest.raises(OverlapError, match=r"'blocks\.0\.up\.weight' is gathered already"),
                GatheredParameters(model.blocks, modifier),
            ):
                pass
            with GatheredParameters(model.blocks[0].up.bias, modifier):
                assert torch.equal(model.blocks[0].up.bias.data, expected["blocks.0.up.bias"])
            assert torch.equal(model.blocks[0].up.weight.data, expected["blocks.0.up.weight"])
        with GatheredParameters(model.blocks, modifier):
            pass
    _assert_equal(_values(model), expected)


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    with GatheredParameters(model.blocks[0]):
        yield


@pytest.mark.parametrize("context", [_gathered, unsharded], ids=["gathered", "unsharded"])
def test_what_would_free_or_replace_whole_parameters_is_refused_inside(ranks, context) -> None:
    """They would be out of date in the middle of the context."""
    ranks(2).run(_refuse_inside, context=context.__name__)


def _refuse_inside(group: Group, context: str) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    state = parity.build(seed=3).state_dict()
    with {"_gathered": _gathered, "unsharded": unsharded}[context](model):
        for action in (
            optimizer.step,
            lambda: zero_engine.release_buffers(model),
            lambda: model.load_state_dict(state),
        ):
            with pytest.raises(StateError, match=r"inside (GatheredParameters|unsharded\(\))"):
                action()
        with pytest.raises(StateError, match="is gathered"):
            zero_engine.set_full_param(model.blocks[0].up.bias, torch.zeros(13))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("who", ["all", "one"])
def test_an_exception_inside_drops_changes_and_reaches_the_others(ranks, who: str) -> None:
    """A rank that waits for one that raised learns why; afterwards everything works again."""
    ranks(2).run(_raise_inside, who=who)


def _raise_inside(group: Group, who: str) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    expected = _values(model)
    for _ in range(2):
        with (
            pytest.raises((KeyError, StateError)) as caught,
            GatheredParameters(model.blocks, modifier_rank=0),
        ):
            model.blocks[0].up.weight.data.zero_()
            if who == "all" or group.rank == 1:
                raise KeyError("mine")
        if group.rank == 0 and who == "one":
            assert "rank 1 left the context with an exception" in str(caught.value)
        else:
            assert caught.type is KeyError
        _assert_equal(_values(model), expected)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)


# ---- unsharded() ----


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_generate_unevenly_and_train_on(ranks, stage: int) -> None:
    """A rank that has said enough must not wait for one that goes on; nor may training change."""
    ranks(2).run(_generate, stage=stage)


def _generate(group: Group, stage: int) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    expected = parity.run_steps(model, optimizer, range(4), rank=group.rank)
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    losses = parity.run_steps(model, optimizer, range(2), rank=group.rank)
    tokens, _ = parity.batch(0, 0, 0)
    with torch.no_grad():
        reference = model(tokens)

    with pytest.raises(KeyError), unsharded(model):
        with record_traffic(group) as traffic, torch.no_grad():
            for _ in range(3 + 4 * group.rank):
                assert torch.equal(model(tokens), reference)
        assert not traffic.operations
        with pytest.raises(StateError, match=r"optimizer\.step\(\) inside unsharded\(\)"):
            optimizer.step()
        raise KeyError

    losses += parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
    assert losses == expected


def test_some_modules_may_be_unsharded_alone(ranks) -> None:
    """Not every model fits whole; what is asked for does."""
    ranks(2).run(_unshard_some)


def _unshard_some(group: Group) -> None:
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    x = torch.ones(1, parity.WIDTH)
    with unsharded(model, ["blocks"]), record_traffic(group) as traffic:
        for block in model.blocks:
            block(x)
        assert not traffic.operations
        assert not zero_partition.parameter_status(model.scale).is_whole
        assert zero_partition.parameter_status(model.blocks[2].up.bias).is_whole
        state = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(state, parity.build().state_dict(), what="inside")
    with (
        pytest.raises(StateError, match=r"expected names of modules.*'layers'"),
        unsharded(model, ["layers"]),
    ):
        pass


def test_a_change_inside_unsharded_is_named(ranks) -> None:
    """It is dropped, which its author should know."""
    ranks(2).run(_edit_unsharded)


def _edit_unsharded(group: Group) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    with (
        pytest.raises(LostEditError, match=r"parameter 'scale' was changed inside"),
        unsharded(model),
        torch.no_grad(),
    ):
        model.scale.zero_()
    assert full_param(model.scale).tolist() == [1.0]
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


def test_what_was_whole_is_given_back(ranks) -> None:
    """Memory between phases is why one leaves the context."""
    ranks(2).run(_give_back)


def _give_back(group: Group) -> None:
    model = parity.Chain(4, 256)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    block_bytes = 256 * 256 * 4
    parity.count_from_here()
    with unsharded(model):
        assert parity.live_bytes(at_least=1024) == 4 * block_bytes
    assert parity.live_bytes(at_least=1024) == 0
