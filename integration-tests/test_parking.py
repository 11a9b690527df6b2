"""Training state that is parked between phases: gone meanwhile, and as if it had never been."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import parity
import parking
import pytest
import torch
import zero_engine
import zero_partition
from parity import ZeroConfig
from parking import PoisonedBackup
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Precision
from zero_partition import StateError, StateKind
from zero_partition.seams import find_sharded, offload_states, reload_states

ALL = tuple(StateKind)
SUBSETS = (ALL, *((kind,) for kind in StateKind), (StateKind.OPTIM, StateKind.MASTERS))
MASTERS = Precision(params=torch.bfloat16)


class Rounded(parity.Tiny):
    """Computes in whatever dtype its parameters have."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens)
        for part in (*self.blocks, *self.gates):
            x = part(x)
        return (self.head(x) * self.scale).float()


# ---- Training goes on as if nothing had been ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_training_that_parks_has_the_bits_of_one_that_never_did(group: Group, stage: int) -> None:
    """Between micro-batches, before and after a step, with every choice of what is parked."""
    cases: list[tuple[Callable[[], nn.Module], Precision | None, str]] = [
        (parity.Tiny, None, "adamw-fused"),
        (parity.tiny_float32, None, "sgd"),
    ]
    if stage:  # stage 0 has no masters
        cases.append((Rounded, MASTERS, "adamw-fused"))
    for turn, (make, precision, name) in enumerate(cases):
        config = ZeroConfig(stage, precision=precision)
        expected_losses, expected = parking.train(*parking.build(group, config, make, name), group)
        for kinds in SUBSETS if precision and stage == 3 else SUBSETS[turn::2]:
            model, optimizer = parking.build(group, config, make, name)
            losses, weights = parking.train(
                model, optimizer, group, parking.offload_and_reload(*kinds)
            )

            assert losses == expected_losses, f"stage {stage}, {kinds}, {precision}"
            parity.assert_same_weights(weights, expected, what=f"stage {stage}, {kinds}")


def test_ranks_that_gather_by_messages_can_park(group: Group) -> None:
    """Nothing is exposed there, and gathers launched ahead are on their way."""
    group = parity.by_messages()
    config = ZeroConfig(3)
    expected = parking.train(*parking.build(group, config, parity.tiny_float32), group)
    model, optimizer = parking.build(group, config, parity.tiny_float32)
    losses, weights = parking.train(model, optimizer, group, parking.offload_and_reload(*ALL))
    assert losses == expected[0]
    parity.assert_same_weights(weights, expected[1], what="by messages")


def test_a_model_built_in_init_can_park_all_of_it(group: Group) -> None:
    """Its shards were made before they had a buffer, and something might still view them."""
    config = ZeroConfig(3)
    expected = parking.train(*parking.build(group, config, parity.Tiny), group)
    with zero_engine.Init(config=config, group=group):
        model = parity.build(parity.Tiny)
    optimizer = parity.OPTIMIZERS["adamw-fused"](parity.param_groups(model))
    zero_engine.shard(model, optimizer, config, group=group)
    losses, weights = parking.train(model, optimizer, group, parking.offload_and_reload(*ALL))
    assert losses == expected[0]
    parity.assert_same_weights(weights, expected[1], what="built in Init")


def test_forwards_go_on_while_the_optimizer_is_parked(group: Group) -> None:
    """Generation between training phases needs parameters, and the room of all else."""
    for stage in parity.STAGES:
        config = ZeroConfig(stage, precision=MASTERS if stage else None)
        plain = parking.build(group, config, Rounded)
        expected = parking.train(*plain, group, steps=range(1))[0]
        with torch.no_grad():
            answer = plain[0](parity.batch(7, 0, group.rank)[0])
        expected += parking.train(*plain, group, steps=range(1, 2))[0]

        model, optimizer = parking.build(group, config, Rounded)
        losses = parking.train(model, optimizer, group, steps=range(1))[0]
        kinds = set(StateKind) - {StateKind.PARAMS}
        offload_states(model, PoisonedBackup(), kinds)
        with torch.inference_mode():
            assert torch.equal(model(parity.batch(7, 0, group.rank)[0]), answer)
        with torch.inference_mode():  # where a loop may well come back from generation
            reload_states(model)
        losses += parking.train(model, optimizer, group, steps=range(1, 2))[0]

        assert losses == expected


def test_backwards_go_on_while_the_optimizer_and_masters_are_parked(group: Group) -> None:
    """Between steps their room can be activations'."""
    for stage in (1, 2, 3):
        config = ZeroConfig(stage, precision=MASTERS)
        plain, plain_optimizer = parking.build(group, config, Rounded)
        expected = parity.run_steps(plain, plain_optimizer, range(3), rank=group.rank)
        model, optimizer = parking.build(group, config, Rounded)
        losses = []
        for step in range(3):
            offload_states(model, PoisonedBackup(), [StateKind.OPTIM, StateKind.MASTERS])
            loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
            loss.backward()
            losses.append(loss.item())
            reload_states(model)
            optimizer.step()
            optimizer.zero_grad()

        assert losses == expected
        parity.assert_same_weights(
            zero_engine.full_state_dict(model),
            zero_engine.full_state_dict(plain),
            what=f"stage {stage}",
        )


def test_a_graph_made_before_runs_backward_after(group: Group) -> None:
    """It reads values that were parked: the same ones, wherever they are by then."""
    for stage in parity.STAGES:
        grads = []
        for parks in (False, True):
            model, optimizer = parking.build(group, ZeroConfig(stage), parity.tiny_float32)
            loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
            if parks:
                kinds = set(StateKind) - {StateKind.BUFFERS}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the graph views parameters that rest whole
                    offload_states(model, PoisonedBackup(), kinds)
                with pytest.raises(StateError, match="reload_states"):
                    loss.backward()
                reload_states(model)
                optimizer.zero_grad()
                loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    offload_states(model, PoisonedBackup(), kinds)
                reload_states(model)
            loss.backward()
            grads.append([zero_engine.full_grad(param) for param in model.parameters()])
        for ours, theirs in zip(*grads, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


def test_a_graph_that_computed_with_stand_ins_leaves_no_gradient() -> None:
    """A part of the model, called by hand, has no hook at its output, and saves its Parameter."""
    model, optimizer = _solo(2, make=parity.tiny_float32)
    plain, plain_optimizer = _solo(2, make=parity.tiny_float32)
    part = model.blocks[0].norm(torch.randn(2, 4, parity.WIDTH))
    offload_states(model, PoisonedBackup(), ALL)
    with pytest.raises(StateError, match="reload_states"):
        part.sum().backward()
    with pytest.raises(StateError, match="zero_grad"):
        optimizer.step()
    reload_states(model)

    ours = parity.run_steps(model, optimizer, range(1, 3), rank=0)

    assert ours == parity.run_steps(plain, plain_optimizer, range(1, 3), rank=0)
    parity.assert_same_weights(model.state_dict(), plain.state_dict(), what="after a stand-in")


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
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(x).float().square().mean().backward()
        expected = {
            StateKind.PARAMS: 2 * (part if stage == 3 else numel),
            StateKind.MASTERS: 4 * part,
            StateKind.GRADS: 4 * part,
            StateKind.OPTIM: 8 * part,
        }
        zero_engine.release_buffers(model)
        before = parity.live_bytes(at_least=1024)
        for kind, num_bytes in expected.items():
            backup = PoisonedBackup()
            offload_states(model, backup, [kind])
            gc.collect()
            report = zero_partition.memory_report(model)

            assert sum(backup.sizes.values()) == num_bytes, f"stage {stage}, {kind}"
            assert before - parity.live_bytes(at_least=1024) == num_bytes
            assert report.parked_bytes == num_bytes
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


def test_every_object_is_the_same_and_views_its_buffer_again(group: Group) -> None:
    """Schedulers, param groups and users hold these very objects."""
    for stage in (1, 2, 3):
        model, optimizer = parking.build(group, ZeroConfig(stage), parity.tiny_float32)
        parking.train(model, optimizer, group, steps=range(1))
        parity.loss_of(model, parity.batch(5, 0, group.rank)).backward()
        sharded = find_sharded(model)
        shards = [p for entry in optimizer.param_groups for p in entry["params"]]
        tensors = {
            **{f"shard {i}": p for i, p in enumerate(shards)},
            **{f"grad {i}": p.grad for i, p in enumerate(shards) if p.grad is not None},
            **{f"{i} {k}": v for i, p in enumerate(shards) for k, v in optimizer.state[p].items()},
        }
        values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        types = {name: type(tensor) for name, tensor in tensors.items()}
        versions = [param._version for param in model.parameters()]

        parking.offload_and_reload(*ALL)(model)

        now = [p for entry in optimizer.param_groups for p in entry["params"]]
        assert list(map(id, now)) == list(map(id, shards))
        assert [param._version for param in model.parameters()] == versions
        for index, shard in enumerate(shards):
            assert shard.grad is tensors.get(f"grad {index}")
            for key, value in optimizer.state[shard].items():
                assert value is tensors[f"{index} {key}"]
        for name, tensor in tensors.items():
            assert type(tensor) is types[name]
            assert torch.equal(tensor, values[name]), name
        for unit in sharded.units:
            for buffer in unit.buffers:
                memory = buffer.shard if buffer.whole is None else buffer.whole
                places = buffer.shard_params if buffer.whole is None else buffer.params
                _assert_within(places, memory)
                _assert_within([buffer.shard], memory)
        for g in sharded.reducer.gradients:
            if g.shard is not None:
                _assert_within(g.parts, g.shard)


def _assert_within(tensors: Any, memory: Tensor) -> None:
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    for tensor in tensors:
        if tensor.numel():
            assert start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= stop


def test_memory_that_somebody_else_views_stays_and_stays_right() -> None:
    """A kept `.data` must not read freed memory, nor go stale without a word."""
    model, optimizer = _solo(2)
    kept = model.layers[0].weight.data
    value = kept.clone()
    with pytest.warns(UserWarning, match="bytes stay in memory"):
        offload_states(model, PoisonedBackup(), ALL)
    assert torch.equal(kept, value)
    with pytest.raises(StateError, match="reload_states"):
        model.layers[0].weight.sum()

    reload_states(model)
    _solo_step(model, optimizer)

    assert not torch.equal(kept, value)
    assert torch.equal(kept, model.layers[0].weight)


# ---- Errors ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_what_needs_parked_state_says_how_to_bring_it_back(group: Group, stage: int) -> None:
    """Else it would read NaN, or address 0."""
    config = ZeroConfig(stage, precision=MASTERS if stage else None)
    expected = parking.train(*parking.build(group, config, Rounded), group)[0]
    model, optimizer = parking.build(group, config, Rounded)
    losses = parking.train(model, optimizer, group, steps=range(1))[0]
    data, param = parity.batch(0, 0, group.rank), model.blocks[0].up.weight
    shard = optimizer.param_groups[0]["params"][0]
    states = [entry for state in optimizer.state.values() for entry in state.values()]
    entry = next((value for value in states if value.dim() and value.numel()), None)
    ours = {}
    if stage < 3:
        ours = {key: value.clone() for key, value in model.state_dict().items()}
    offload_states(model, PoisonedBackup(), ALL)
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(data[0]),
        "forward of a part": lambda: model.blocks[0](torch.randn(2, 4, 6)),
        "backward without a batch": lambda: zero_engine.backward_without_batch(model),
        "step": optimizer.step,
        "zero_grad to zeros": lambda: optimizer.zero_grad(set_to_none=False),
        "clip": lambda: zero_engine.clip_grad_norm_(model, 1.0),
        "unscale": lambda: zero_engine.unscale_and_clip_(model),
        "full_param": lambda: zero_engine.full_param(param),
        "local_param": lambda: zero_engine.local_param(param),
        "set_full_param": lambda: zero_engine.set_full_param(param, torch.zeros(13, 6)),
        "full_grad": lambda: zero_engine.full_grad(param),
        "full_optimizer_state": lambda: zero_engine.full_optimizer_state(param, "exp_avg"),
        "full_state_dict": lambda: zero_engine.full_state_dict(model),
        "state_dict": model.state_dict,
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict({}),
        "unsharded": lambda: zero_engine.unsharded(model).__enter__(),
        "GatheredParameters": lambda: zero_engine.GatheredParameters(
            param, modifier_rank=0
        ).__enter__(),
        "unshard": lambda: zero_engine.unshard(model, optimizer),
        "coalesce": lambda: zero_engine.coalesce_reduction(model).__enter__(),
        "arithmetic": lambda: shard + 1,
        "a copy": lambda: copy.deepcopy(shard),
        "a pickle": lambda: pickle.dumps(shard),
        "in place": shard.zero_,
        "again": lambda: offload_states(model, PoisonedBackup(), ALL),
    }
    if stage < 3:
        uses["values"] = param.tolist
        uses["data"] = lambda: param.data
    if entry is not None:
        uses["state"] = entry.sum
    for name, use in uses.items():
        if stage == 3 and name == "state_dict":
            continue  # refused there anyway
        with pytest.raises(StateError, match=r"reload_states\(model\)"):
            use()
    if ours:
        with pytest.raises((StateError, RuntimeError), match=r"reload_states\(model\)"):
            model.load_state_dict(ours)
    assert "parked" in repr(shard)
    optimizer.zero_grad()
    zero_engine.release_buffers(model)
    zero_partition.memory_report(model)
    gc.collect()
    reload_states(model)
    reload_states(model)  # twice is as good as once
    losses += parking.train(model, optimizer, group, steps=range(1, 2))[0]
    assert losses == expected, f"stage {stage}"


def test_a_step_is_refused_before_it_has_done_anything(group: Group) -> None:
    """Half a step, or gradients that were lent and not taken back, would be the end of the run."""

    def disturb(model: nn.Module) -> None:
        optimizer = find_sharded(model).optimizer
        for kind in (k for k in StateKind if k is not StateKind.BUFFERS):
            offload_states(model, PoisonedBackup(), [kind])
            with pytest.raises(StateError, match=rf"optimizer\.step\(\) needs .*: {kind.value} "):
                optimizer.step()
            reload_states(model)

    for stage in (1, 3):
        config = ZeroConfig(stage, precision=MASTERS)
        expected = parking.train(*parking.build(group, config, Rounded), group)
        losses, weights = parking.train(*parking.build(group, config, Rounded), group, disturb)
        assert losses == expected[0]
        parity.assert_same_weights(weights, expected[1], what=f"stage {stage}")


@pytest.mark.parametrize("stage", parity.STAGES)
def test_nothing_is_parked_while_it_is_used(group: Group, stage: int) -> None:
    """A forward, a backward or a context would go on with memory that is gone."""
    model, optimizer = parking.build(group, ZeroConfig(stage), parity.tiny_float32)
    data = parity.batch(0, 0, group.rank)
    errors: list[str] = []

    def attempt(*_: Any) -> None:
        backup = PoisonedBackup()
        with pytest.raises(StateError) as caught:
            offload_states(model, backup, ALL)
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
    parking.offload_and_reload(*ALL)(model)


def test_a_backup_that_fails_on_one_rank_leaves_everything_where_it_was(group: Group) -> None:
    """A disk that is full on one machine must not cost the run, nor part the ranks."""
    for stage in (1, 3):

        def disturb(model: nn.Module) -> None:
            for fails_at in (0, 2):
                backup = PoisonedBackup(fails_at if group.rank == 1 else -1)
                expected = OSError if group.rank == 1 else StateError
                text = "disk is full" if group.rank == 1 else "another rank"
                with pytest.raises(expected, match=text):
                    offload_states(model, backup, ALL)
                assert backup.is_closed

        config = ZeroConfig(stage)
        expected = parking.train(*parking.build(group, config, parity.tiny_float32), group)
        model, optimizer = parking.build(group, config, parity.tiny_float32)
        losses, weights = parking.train(model, optimizer, group, disturb)
        assert losses == expected[0]
        parity.assert_same_weights(weights, expected[1], what=f"stage {stage}")


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


def _solo(
    stage: int, *, make: Callable[[], nn.Module] = parity.Chain
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(make)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    zero_engine.shard(model, optimizer, ZeroConfig(stage))
    if make is parity.Chain:
        _solo_step(model, optimizer)
    else:
        parity.run_steps(model, optimizer, range(1), rank=0)
    return model, optimizer


def _solo_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-1, 1, 128).view(2, 64)
    parity.finish_step(model(x).square().mean(), optimizer)
