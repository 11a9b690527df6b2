"""Training state that is parked between phases: gone meanwhile, and as if it had never been."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import parity
import parking
import pytest
import torch
import zero_engine
import zero_partition
from one_dtype import OneDtype
from parity import ZeroConfig
from parking import PoisonedBackup, Training, offload_and_reload
from torch import nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import Precision
from zero_partition import StateError, StateKind
from zero_partition.planning import keeps_free_memory
from zero_partition.seams import find_sharded, offload_states, reload_states

ALL = tuple(StateKind)
SUBSETS = (ALL, *((kind,) for kind in StateKind), (StateKind.OPTIM, StateKind.MASTERS))
MASTERS = Precision(params=torch.bfloat16)


def _build(
    group: Group,
    stage: int,
    make: Callable[[], nn.Module] = parity.tiny_float32,
    name: str = "adamw-fused",
) -> Training:
    """In bf16 with masters where the model is made for it, which stage 0 has not."""
    precision = MASTERS if make is OneDtype and stage else None
    return parity.build_sharded(group, ZeroConfig(stage, precision=precision), name, make)


# ---- Training goes on as if nothing had been ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_training_that_parks_has_the_bits_of_one_that_never_did(group: Group, stage: int) -> None:
    """Between micro-batches, before and after a step, with every choice of what is parked."""
    cases = ((parity.Tiny, "adamw-fused"), (parity.tiny_float32, "sgd"), (OneDtype, "adamw-fused"))
    for turn, (make, name) in enumerate(cases if stage else cases[:2]):
        chosen = SUBSETS if make is OneDtype and stage == 3 else SUBSETS[turn::2]
        disturbs = [offload_and_reload(*kinds) for kinds in chosen]
        parking.assert_same_bits(group, partial(_build, group, stage, make, name), *disturbs)


def test_ranks_that_gather_by_messages_can_park(group: Group) -> None:
    """Nothing is exposed there, and gathers launched ahead are on their way."""
    group = parity.by_messages()
    disturbs = [offload_and_reload(*kinds) for kinds in (ALL, [StateKind.PARAMS])]
    parking.assert_same_bits(group, partial(_build, group, 3), *disturbs)


def test_a_model_built_in_init_can_park_all_of_it(group: Group) -> None:
    """Its shards were made before they had a buffer, and something might still view them."""
    config = ZeroConfig(3)

    def build() -> Training:
        with zero_engine.Init(config=config, group=group):
            model = parity.build(parity.Tiny)
        optimizer = parity.OPTIMIZERS["adamw-fused"](parity.param_groups(model))
        return zero_engine.shard(model, optimizer, config, group=group)

    parking.assert_same_bits(group, build, offload_and_reload(*ALL))


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> None:
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


def _shard_anew(model: Any, optimizer: Any, group: Group, folder: Path, stage: int) -> None:
    zero_engine.unshard(model, optimizer)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)


def _load(model: Any, optimizer: Any, group: Group, folder: Path, stage: int) -> None:
    zero_engine.save(folder, model, optimizer, step=1)
    zero_engine.load(folder, model, optimizer)


def _load_whole(model: Any, optimizer: Any, group: Group, folder: Path, stage: int) -> None:
    whole = zero_engine.full_optimizer_state_dict(model)
    zero_engine.load_full_optimizer_state_dict(model, whole)


def _thaw(model: Any, optimizer: Any, group: Group, folder: Path, stage: int) -> None:
    model.blocks[0].requires_grad_(False)
    _shard_anew(model, optimizer, group, folder, stage)
    model.blocks[0].requires_grad_(True)
    _step_of(model, optimizer, group)


def _set(model: Any, optimizer: Any, group: Group, folder: Path, stage: int) -> None:
    param = model.blocks[0].up.weight
    value = zero_engine.full_optimizer_state(param, "exp_avg")
    zero_engine.set_full_optimizer_state(param, "exp_avg", value)


@pytest.mark.parametrize("stage", parity.STAGES)
@pytest.mark.parametrize("way", [_shard_anew, _load, _load_whole, _set, _thaw])
def test_state_can_be_parked_whichever_way_it_came(
    group: Group, tmp_path: Path, stage: int, way: Callable[..., None]
) -> None:
    """Not if it is a view of other memory, for autograd or in truth."""
    model, optimizer = _build(group, stage)
    _step_of(model, optimizer, group)
    way(model, optimizer, group, tmp_path, stage)
    offload_and_reload(*ALL)(model)  # where a warning that something stays is an error
    _step_of(model, optimizer, group)


@pytest.mark.parametrize("stage", parity.STAGES)
def test_forwards_and_backwards_go_on_while_what_they_do_not_need_is_parked(
    group: Group, stage: int
) -> None:
    """Generation between phases needs parameters alone, and activations the room of state."""
    plain, its = _build(group, stage, OneDtype)
    model, optimizer = _build(group, stage, OneDtype)
    data = parity.batch(7, 0, group.rank)[0]
    for step in range(3):
        offload_states(model, PoisonedBackup(), set(StateKind) - {StateKind.PARAMS})
        with torch.no_grad():
            expected = plain(data)
        with torch.inference_mode():  # where a loop may well come back from generation
            assert equal(model(data), expected)
            reload_states(model)
        offload_states(model, PoisonedBackup(), [StateKind.OPTIM, StateKind.MASTERS])
        loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
        loss.backward()
        reload_states(model)
        optimizer.step()
        optimizer.zero_grad()
        assert [loss.item()] == parity.run_steps(plain, its, [step], rank=group.rank)
    parity.assert_same_weights(
        zero_engine.full_state_dict(model), zero_engine.full_state_dict(plain), what="whole"
    )


def test_a_graph_made_before_runs_backward_after(group: Group) -> None:
    """It reads values that were parked: the same ones, wherever they are by then."""
    for stage in parity.STAGES:
        grads = []
        for parks in (False, True):
            model, _ = _build(group, stage)
            loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
            if parks:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the graph views parameters that rest whole
                    offload_states(model, PoisonedBackup(), set(StateKind) - {StateKind.BUFFERS})
                reload_states(model)
            loss.backward()
            grads.append([zero_engine.full_grad(param) for param in model.parameters()])
        for ours, theirs in zip(*grads, strict=True):
            assert ours is theirs or equal(ours, theirs)


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_backward_while_state_is_parked_leaves_no_gradient(group: Group, stage: int) -> None:
    """Also that of a part that was called by hand, which has no hook, and saves its Parameter."""
    model, optimizer = _build(group, stage)
    plain, its = _build(group, stage)
    for is_part in (False, True):
        if is_part:
            loss = model.blocks[0].norm(torch.randn(2, 4, parity.WIDTH)).sum()
        else:
            loss = parity.loss_of(model, parity.batch(9, 0, group.rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            offload_states(model, PoisonedBackup(), set(StateKind) - {StateKind.BUFFERS})
        with pytest.raises(StateError, match="reload_states"):
            loss.backward()
        with pytest.raises(StateError, match=r"reload_states|zero_grad"):
            optimizer.step()
        reload_states(model)
        if stage == 0 or not is_part:
            optimizer.zero_grad()
        losses = parity.run_steps(model, optimizer, range(1, 3), rank=group.rank)
        assert losses == parity.run_steps(plain, its, range(1, 3), rank=group.rank), is_part


# ---- Memory ----


def test_parked_bytes_are_those_of_the_formula(group: Group) -> None:
    """Who makes room must know how much; counted from Python's own tensors, not by our report."""
    numel = sum(param.numel() for param in parity.Chain().parameters())
    part = numel // group.world_size
    for stage in (1, 2, 3):
        parity.count_from_here()
        model = parity.build(parity.Chain)
        optimizer = parity.adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=MASTERS), group=group)
        x = torch.randn(4, 64, dtype=torch.bfloat16)
        for _ in range(2):
            parity.finish_step(model(x).float().square().mean(), optimizer)
        model(x).float().square().mean().backward()
        # At stage 3 on a device parameters are rounded from masters, and kept while these are away.
        is_rounded = stage == 3 and not keeps_free_memory(group.device)
        kept = {StateKind.MASTERS: 2 * part if is_rounded else 0}
        expected = {
            StateKind.PARAMS: 0 if is_rounded else 2 * (part if stage == 3 else numel),
            StateKind.MASTERS: 4 * part,
            StateKind.GRADS: 4 * part,
            StateKind.OPTIM: 8 * part,
        }
        zero_engine.release_buffers(model)
        before = parity.live_bytes(at_least=1024)
        for kind, num_bytes in expected.items():
            backup = PoisonedBackup()
            offload_states(model, backup, [kind])

            assert sum(backup.sizes.values()) == num_bytes, f"stage {stage}, {kind}"
            assert before - parity.live_bytes(at_least=1024) == num_bytes - kept.get(kind, 0)
            assert zero_partition.memory_report(model).parked_bytes == num_bytes
            reload_states(model)
            assert parity.live_bytes(at_least=1024) == before
        offload_states(model, PoisonedBackup(), ALL)
        report = zero_partition.memory_report(model)

        assert parity.live_bytes(at_least=1024) == 0
        assert report.parked_bytes == sum(expected.values())
        assert report.total_bytes == report.scalars_bytes  # step counts and stand-ins
        reload_states(model)
        assert zero_partition.memory_report(model).parked_bytes == 0
        del model, optimizer, x


def test_every_object_is_the_same_as_before(group: Group) -> None:
    """Schedulers, param groups and users hold these very objects."""
    for stage in (1, 2, 3):
        model, optimizer = _build(group, stage)
        parking.train(model, optimizer, group, steps=range(1))
        parity.loss_of(model, parity.batch(5, 0, group.rank)).backward()
        held = []
        for _ in range(2):
            shards = [p for entry in optimizer.param_groups for p in entry["params"]]
            state = [value for p in shards for value in optimizer.state[p].values()]
            tensors = [*shards, *(p.grad for p in shards), *state]
            versions = [param._version for param in model.parameters()]
            held.append([versions, *((id(tensor), type(tensor)) for tensor in tensors)])
            offload_and_reload(*ALL)(model)
        assert held[0] == held[1]


def test_memory_that_somebody_else_views_stays_and_stays_right() -> None:
    """A kept `.data` must not read freed memory, nor go stale without a word."""
    model, optimizer = _solo(2)
    kept = model.layers[0].weight.data
    value = kept.clone()
    with pytest.warns(UserWarning, match="bytes stay in memory"):
        offload_states(model, PoisonedBackup(), ALL)
    assert equal(kept, value)
    with pytest.raises(StateError, match="reload_states"):
        model.layers[0].weight.sum()

    reload_states(model)
    _solo_step(model, optimizer)

    assert not equal(kept, value)
    assert equal(kept, model.layers[0].weight)


# ---- Errors ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_what_needs_parked_state_says_how_to_bring_it_back(group: Group, stage: int) -> None:
    """Else it would read NaN, or address 0."""
    expected = parking.train(*_build(group, stage, OneDtype), group)[0]
    model, optimizer = _build(group, stage, OneDtype)
    losses = parking.train(model, optimizer, group, steps=range(1))[0]
    data, param = parity.batch(0, 0, group.rank), model.blocks[0].up.weight
    shard = optimizer.param_groups[0]["params"][0]
    states = [entry for state in optimizer.state.values() for entry in state.values()]
    entry = next(value for value in states if value.dim() and value.numel())
    uses: list[Callable[[], Any]] = [
        lambda: model(data[0]),
        lambda: model.blocks[0](torch.randn(2, 4, 6)),
        lambda: zero_engine.backward_without_batch(model),
        optimizer.step,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: zero_engine.clip_grad_norm_(model, 1.0),
        lambda: zero_engine.unscale_and_clip_(model),
        lambda: zero_engine.full_param(param),
        lambda: zero_engine.local_param(param),
        lambda: zero_engine.set_full_param(param, torch.zeros(13, 6)),
        lambda: zero_engine.full_grad(param),
        lambda: zero_engine.full_optimizer_state(param, "exp_avg"),
        lambda: zero_engine.full_state_dict(model),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: zero_engine.unsharded(model).__enter__(),
        lambda: zero_engine.GatheredParameters(param, modifier_rank=0).__enter__(),
        lambda: zero_engine.unshard(model, optimizer),
        lambda: zero_engine.coalesce_reduction(model).__enter__(),
        lambda: shard + 1,
        lambda: copy.deepcopy(shard),
        lambda: pickle.dumps(shard),
        shard.zero_,
        entry.sum,
        lambda: offload_states(model, PoisonedBackup(), ALL),
    ]
    if stage < 3:
        ours = {key: value.clone() for key, value in model.state_dict().items()}
        uses += [model.state_dict, lambda: model.load_state_dict(ours)]
        uses += [param.tolist, lambda: param.data]
    offload_states(model, PoisonedBackup(), ALL)
    for use in uses:
        with pytest.raises((StateError, RuntimeError), match=r"reload_states\(model\)"):
            use()
    assert "parked" in repr(shard)
    optimizer.zero_grad()
    zero_engine.release_buffers(model)
    zero_partition.memory_report(model)
    gc.collect()
    reload_states(model)
    reload_states(model)  # twice is as good as once
    losses += parking.train(model, optimizer, group, steps=range(1, 2))[0]
    assert losses == expected, f"stage {stage}"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_is_refused_before_it_has_done_anything(group: Group, stage: int) -> None:
    """Half a step, or gradients that were lent and not taken back, would be the end of the run."""

    def disturb(model: nn.Module) -> None:
        optimizer = find_sharded(model).optimizer
        for kind in (k for k in StateKind if k is not StateKind.BUFFERS):
            offload_states(model, PoisonedBackup(), [kind])
            with pytest.raises(StateError, match=rf"optimizer\.step\(\) needs .*: {kind.value} "):
                optimizer.step()
            reload_states(model)

    parking.assert_same_bits(group, partial(_build, group, stage, OneDtype), disturb)


@pytest.mark.parametrize("stage", parity.STAGES)
def test_nothing_is_parked_while_it_is_used(group: Group, stage: int) -> None:
    """A forward, a backward or a context would go on with memory that is gone."""
    model, optimizer = _build(group, stage)
    data = parity.batch(0, 0, group.rank)
    errors: list[str] = []

    def attempt(*_: Any) -> None:
        backup = PoisonedBackup()
        with pytest.raises(StateError) as caught:
            offload_states(model, backup, [StateKind.PARAMS])
        assert backup.is_closed and not backup.kept
        errors.append(str(caught.value))

    handle = model.blocks[0].register_forward_hook(attempt)
    loss = parity.loss_of(model, data)
    handle.remove()
    assert "during a forward" in errors.pop()
    handle = model.scale.register_hook(attempt)
    loss.backward()
    handle.remove()
    assert "during a forward or backward" in errors.pop()
    with zero_engine.unsharded(model):
        attempt()
    assert "unsharded()" in errors.pop()
    broken = parity.loss_of(model, data) * 1.0
    handle = model.scale.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.backward()
    handle.remove()
    attempt()
    assert "zero_grad()" in errors.pop()
    optimizer.zero_grad()
    del loss, broken
    parity.loss_of(model, data).backward()  # torch keeps the graph that failed until another ends
    offload_and_reload(*ALL)(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backup_that_fails_on_one_rank_leaves_everything_where_it_was(
    group: Group, stage: int
) -> None:
    """A disk that is full on one machine must not cost the run, nor part the ranks."""
    fails = group.rank == 1

    def disturb(model: nn.Module) -> None:
        for fails_at in (0, 2):
            backup = PoisonedBackup(fails_at if fails else -1)
            expected, text = (OSError, "disk is full") if fails else (StateError, "another rank")
            with pytest.raises(expected, match=text):
                offload_states(model, backup, ALL)
            assert backup.is_closed

    parking.assert_same_bits(group, partial(_build, group, stage), disturb)


def test_a_backup_that_fails_to_give_back_can_be_asked_again() -> None:
    """What a disk holds is still there after a read that failed."""
    plain, plain_optimizer = _solo(2)
    model, optimizer = _solo(2)
    backup = PoisonedBackup()
    offload_states(model, backup, ALL)
    backup.fails_at, backup._num_copies = 1, 0
    with pytest.raises(OSError, match="disk is full"):
        reload_states(model)
    with pytest.raises(StateError, match="reload_states"):
        model(torch.ones(1, 64))
    reload_states(model)
    _solo_step(model, optimizer)
    _solo_step(plain, plain_optimizer)
    parity.assert_same_weights(model.state_dict(), plain.state_dict(), what="asked again")


def test_buffers_alone_are_released_and_nothing_is_parked() -> None:
    """They come back by themselves, so nobody has to be asked for them."""
    model, optimizer = _solo(2)
    backup = PoisonedBackup()
    for _ in range(2):
        offload_states(model, backup, [StateKind.BUFFERS])
        assert backup.is_closed and not backup.sizes
        report = zero_partition.memory_report(model)
        assert (report.slots_bytes, report.reduction_bytes) == (0, 0)
        _solo_step(model, optimizer)


def test_a_model_that_is_deleted_while_parked_is_gone() -> None:
    """A parked model must be no leak, and its backup no reason to live."""
    model, optimizer = _solo(2)
    backup = PoisonedBackup()
    offload_states(model, backup, ALL)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def _solo(stage: int) -> Training:
    model = parity.build(parity.Chain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage))
    _solo_step(model, optimizer)
    return model, optimizer


def _solo_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-1, 1, 128).view(2, 64)
    parity.finish_step(model(x).square().mean(), optimizer)


def test_a_forward_without_masters_computes_with_what_they_round_to(group: Group) -> None:
    """Text is generated while all that only training needs is away, and training goes on."""
    for stage in (1, 2, 3):
        model = parity.build(parity.Chain)
        optimizer = parity.adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=MASTERS), group=group)
        x = torch.randn(4, 64, dtype=torch.bfloat16)
        parity.finish_step(model(x).float().square().mean(), optimizer)
        with torch.no_grad():
            before = model(x)
        offload_states(model, PoisonedBackup(), [StateKind.MASTERS, StateKind.OPTIM])
        with torch.no_grad():
            assert equal(model(x), before), f"stage {stage}"
        reload_states(model)
        with torch.no_grad():
            assert equal(model(x), before), f"stage {stage}"
        parity.finish_step(model(x).float().square().mean(), optimizer)
