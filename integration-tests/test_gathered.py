"""Parameters made whole on demand: what is read is right, what is written arrives or is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
import zero_partition
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, record_traffic
from zero_comm.testing import assert_close, equal
from zero_engine import GatheredParameters, Offload, Precision, full_param, unsharded
from zero_partition import LostEditError, OverlapError, StateError, memory_report
from zero_partition.seams import find_sharded

STAGES = parity.STAGES
BF16 = Precision(params=torch.bfloat16)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_param(param) for name, param in model.named_parameters()}


def _assert_equal(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert values.keys() == expected.keys()
    different = [name for name, value in values.items() if not equal(value, expected[name])]
    assert not different, different


# ---- Reading ----


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(1, 3)
def test_inside_every_parameter_is_whole_in_its_own_object(group: Group, stage: int) -> None:
    """One, some in any order and more than once, a generator, a module: users pass all of them."""
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
                    assert equal(param.data, plain[name]), (what, name)
                    assert equal(param, plain[name]), (what, name)
                    assert str(param) == str(plain[name])
                    assert equal(copy.deepcopy(param), plain[name])
        left = {name: (param.data_ptr(), type(param)) for name, param in model.named_parameters()}
        assert left == at_rest, what
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


def test_parameters_of_no_sharded_model_are_left_alone(group: Group) -> None:
    """Libraries wrap every read in a gather, sharded or not."""
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
def test_forward_and_backward_inside_are_those_outside(group: Group, stage: int) -> None:
    """Also where only a part of a unit is gathered, and where backward runs after the end."""
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


def test_backward_of_a_graph_made_before_is_refused_inside(group: Group) -> None:
    """Its views point into slots that are not filled while a unit is whole elsewhere."""
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
def test_the_modifiers_values_are_everyones(group: Group, stage: int, modifier: int) -> None:
    """In place, through `data`, or by new memory: the three ways in which weights are set."""
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


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        *((stage, {}) for stage in STAGES),
        (3, {"small_param_numel": 20}),
        *((stage, {"precision": BF16}) for stage in (1, 2, 3)),
    ],
)
def test_one_rank_loads_a_state_dict_for_all(
    group: Group, stage: int, options: dict[str, Any]
) -> None:
    """As scripts do with weights that one rank alone has read; a part of a model, too."""
    make = parity.tiny_float32
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage, **options), make=make)
    given = parity.build(make, seed=3).state_dict()
    rounds = torch.bfloat16 if options.get("precision") else torch.float64  # what is whole does
    expected = {name: given[name].to(rounds) for name in _values(model)}
    part = model.blocks[0]

    with GatheredParameters(model, modifier_rank=1):
        if group.rank == 1:
            loaded = model.load_state_dict(given)
            assert not loaded.missing_keys and not loaded.unexpected_keys
    _assert_equal({name: value.to(rounds) for name, value in _values(model).items()}, expected)
    if not options.get("precision"):  # whose norms want inputs of their own dtype
        parity.run_steps(model, optimizer, range(1), rank=group.rank)
    before = _values(model)
    with GatheredParameters(part, modifier_rank=0):
        part.load_state_dict({name: value + 1 for name, value in part.state_dict().items()})
    for name, value in _values(model).items():
        is_changed = name.startswith("blocks.0.")
        assert_close(value, before[name] + is_changed, rtol=0.01, atol=0.01)
    with GatheredParameters(model, modifier_rank=0):
        alone = {"embed.weight": given["embed.weight"]}
        model.load_state_dict(alone, strict=False)  # and nothing of other modules
    with GatheredParameters(part, modifier_rank=0):
        if stage == 3 or (stage and options.get("precision")):
            with pytest.raises(StateError, match="inside GatheredParameters"):
                model.load_state_dict(given)


# ---- What is not written: between Init and shard(), and after it ----

either = pytest.mark.parametrize("is_sharded", [False, True], ids=["Init", "shard"])


def _build(group: Group, is_sharded: bool) -> nn.Module:
    """A model of which each rank keeps a part."""
    if is_sharded:
        return parity.build_sharded(group, ZeroConfig(3), make=parity.tiny_float32)[0]
    with zero_engine.Init(group=group):
        return parity.build(parity.tiny_float32)


def _assert_is(plain: nn.Module, model: nn.Module, group: Group) -> None:
    if find_sharded(model) is None:
        zero_engine.shard(model, None, ZeroConfig(3), group=group)
    weights = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(weights, plain.state_dict(), what="afterwards")


def _assert_unchanged(model: nn.Module, group: Group) -> None:
    _assert_is(parity.build(parity.tiny_float32), model, group)


@either
@pytest.mark.parametrize("way", ["in place", "new memory", "data"])
def test_a_change_by_nobody_in_particular_raises_on_all_ranks(
    group: Group, way: str, is_sharded: bool
) -> None:
    """An error on the editing rank alone would leave the others waiting for it."""
    model = _build(group, is_sharded)
    weight = model.blocks[1].up.weight
    with (
        pytest.raises(LostEditError, match=r"rank 1 changed parameter '.*weight'"),
        GatheredParameters(model.blocks, sanity_checks=way == "data"),
        torch.no_grad(),
    ):
        if group.rank == 1 and way == "in place":
            weight.zero_()
        elif group.rank == 1 and way == "new memory":
            weight.data = torch.zeros_like(weight)
        elif group.rank == 1:
            weight.data.view(-1)[0] += 1
    _assert_unchanged(model, group)


def test_a_change_that_is_not_looked_for_is_dropped(group: Group) -> None:
    """Writes through `data` bump no counter; what they wrote must not outlive the context."""
    model = _build(group, is_sharded=True)
    with GatheredParameters(model):
        for param in model.parameters():
            param.data.zero_()
    _assert_unchanged(model, group)


@either
def test_what_cannot_be_gathered_or_written_leaves_no_mark(group: Group, is_sharded: bool) -> None:
    """No such modifier, a new shape, for which shards have no room, two with the last word."""
    model = _build(group, is_sharded)
    up = model.blocks[0].up
    with pytest.raises(StateError, match=r"expected modifier_rank in 0\.\.1.*got 2"):
        GatheredParameters(model, modifier_rank=2).__enter__()
    with (
        pytest.raises(StateError, match=r"rank 1 left parameter .* with another shape"),
        GatheredParameters(up.weight, modifier_rank=1),
    ):
        if group.rank == 1:
            up.weight.data = torch.ones(2)
    for modifier in (None, 0):
        with GatheredParameters([up.weight, model.scale], modifier):
            with (
                pytest.raises(OverlapError, match=r"'.*weight' is gathered already"),
                GatheredParameters(model.blocks, modifier),
            ):
                pass
            with GatheredParameters(up.bias, modifier):
                assert up.bias.shape == (13,)
            assert up.weight.shape == (13, parity.WIDTH)
    if not is_sharded:
        with zero_engine.Init(group=group), GatheredParameters(model.scale):  # gathers by itself
            assert model.scale.tolist() == [1.0]
    _assert_unchanged(model, group)


@either
@pytest.mark.parametrize("who", ["all", "one"])
def test_an_exception_inside_drops_changes_and_reaches_the_others(
    group: Group, who: str, is_sharded: bool
) -> None:
    """A rank that waits for one that raised learns why."""
    model = _build(group, is_sharded)
    has_raised = who == "all" or group.rank == 1
    for _ in range(2):
        with (
            pytest.raises(
                KeyError if has_raised else StateError,
                match="mine" if has_raised else "rank 1 left the context with an exception",
            ),
            GatheredParameters(model.blocks, modifier_rank=0),
        ):
            model.blocks[0].up.weight.data.zero_()
            if has_raised:
                raise KeyError("mine")
    _assert_unchanged(model, group)


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    with GatheredParameters(model.blocks[0]):
        yield


@pytest.mark.parametrize("context", [_gathered, unsharded], ids=["gathered", "unsharded"])
def test_what_would_free_or_replace_whole_parameters_is_refused_inside(
    group: Group, context
) -> None:
    """They would be out of date in the middle of the context."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    state = parity.build(seed=3).state_dict()
    with context(model):
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


# ---- unsharded() ----


@pytest.mark.parametrize(("stage", "params"), [*((s, "device") for s in STAGES), (3, "disk")])
def test_ranks_may_generate_unevenly_and_train_on(
    group: Group, tmp_path: Path, stage: int, params: str
) -> None:
    """A rank that has said enough must not wait for one that goes on; nor may training change."""
    offload = Offload(params="disk", path=tmp_path) if params == "disk" else None
    config = ZeroConfig(stage, offload=offload)
    model, optimizer = parity.build_sharded(group, config)
    expected = parity.run_steps(model, optimizer, range(4), rank=group.rank)
    model, optimizer = parity.build_sharded(group, config)
    losses = parity.run_steps(model, optimizer, range(2), rank=group.rank)
    weights, (tokens, _) = _values(model), parity.batch(0, 0, 0)
    with torch.no_grad():
        reference = model(tokens)

    with pytest.raises(KeyError), unsharded(model):
        with record_traffic(group) as traffic, torch.no_grad():
            for _ in range(3 + 4 * group.rank):
                assert equal(model(tokens), reference)
            for name, param in model.named_parameters():
                assert equal(param.detach() + 0, weights[name])  # outside a forward, too
        assert not traffic.operations
        with pytest.raises(StateError, match=r"optimizer\.step\(\) inside unsharded\(\)"):
            optimizer.step()
        raise KeyError

    losses += parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
    assert losses == expected


def test_the_device_holds_no_more_than_in_training(group: Group, tmp_path: Path) -> None:
    """Who offloads parameters has no room for all of them: only the disk may have whole copies."""
    model = parity.Chain(6, 32)
    offload = Offload(params="disk", path=tmp_path)
    config = ZeroConfig(3, min_unit_bytes=0, window=2, offload=offload)
    zero_engine.shard(model, None, config, group=group)
    x, shards = torch.ones(4, 32), 6 * 32 * 32 * 4 // 2
    with torch.no_grad():
        for _ in range(2):
            model(x)
        before = memory_report(model)
        with unsharded(model):
            for _ in range(2):
                model(x)
            inside = memory_report(model)

    assert before.disk_bytes == memory_report(model).disk_bytes == shards
    assert inside.disk_bytes == shards + 2 * shards
    assert inside.total_bytes == before.total_bytes


def test_some_modules_may_be_unsharded_alone(group: Group) -> None:
    """Not every model fits whole; what is asked for does."""
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


def test_a_change_inside_unsharded_is_named(group: Group) -> None:
    """It is dropped, which its author should know."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    with (
        pytest.raises(LostEditError, match=r"parameter 'scale' was changed inside"),
        unsharded(model),
        torch.no_grad(),
    ):
        model.scale.zero_()
    assert full_param(model.scale).tolist() == [1.0]
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


def test_what_was_whole_is_given_back(group: Group) -> None:
    """Memory between phases is why one leaves the context."""
    model = parity.Chain(4, 256)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    block_bytes = 256 * 256 * 4
    parity.count_from_here()
    with unsharded(model):
        assert parity.live_bytes(at_least=1024) == 4 * block_bytes
    assert parity.live_bytes(at_least=1024) == 0


# ---- Between Init and shard() ----


@pytest.mark.ranks(1, 3)
def test_values_are_read_between_init_and_shard(group: Group) -> None:
    """DeepSpeed has its example of GatheredParameters there; stand-ins would be read as NaN."""
    model, plain = _build(group, is_sharded=False), parity.build(parity.tiny_float32)
    backwards = list(model.parameters())
    if group.rank:
        backwards.reverse()

    with GatheredParameters(backwards + backwards):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert equal(ours, theirs)
        data = parity.batch(0, 0, group.rank)
        assert parity.loss_of(model, data).item() == parity.loss_of(plain, data).item()
        assert list(model.state_dict()) == list(plain.state_dict())

    for param in model.parameters():
        assert param.untyped_storage().nbytes() == param.element_size()
    with pytest.raises(StateError, match="was sharded by Init"):
        model(parity.batch(0, 0, group.rank)[0])
    _assert_is(plain, model, group)


@pytest.mark.parametrize("modifier", [0, 1])
@pytest.mark.ranks(2, 3)
def test_one_rank_writes_for_all_between_init_and_shard(group: Group, modifier: int) -> None:
    """So transformers initialises a model of stage 3, and scripts load old weights into one."""
    model, plain = _build(group, is_sharded=False), parity.build(parity.tiny_float32)
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
    _assert_is(plain, model, group)
    _assert_is(plain, copied, group)


# ---- state_dict() where parameters are whole ----


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_part_of_a_state_dict_is_a_small_file(group: Group, tmp_path: Path, stage: int) -> None:
    """torch.save writes whole storages, and a layer lies in the flat buffer of its unit.

    Values are the parameters' own memory all the same: what is written there is trained on.
    """
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage), make=parity.tiny_float32)
    part = model.blocks[0].up
    versions = [param._version for param in model.parameters()]
    state = part.state_dict()
    torch.save(state, file := tmp_path / f"{group.rank}.pt")
    torch.save(parity.tiny_float32().blocks[0].up.state_dict(), plain := tmp_path / f"{group.rank}")

    torch.save(model.state_dict(), whole := tmp_path / f"{group.rank} whole")
    loaded = torch.load(whole)
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()  # tied, and once
    assert file.stat().st_size == pytest.approx(plain.stat().st_size, abs=200)
    assert state["weight"].data_ptr() == part.weight.data_ptr()
    assert [param._version for param in model.parameters()] == versions
    before = part.weight._version
    state["weight"].mul_(2)
    assert part.weight._version == before + 1 == state["weight"]._version
    alone, its_optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    with torch.no_grad():
        alone.blocks[0].up.weight.mul_(2)
    losses = parity.run_steps(model, optimizer, range(2), rank=0)
    assert losses == parity.run_steps(alone, its_optimizer, range(2), rank=0)
