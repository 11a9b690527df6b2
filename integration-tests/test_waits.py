"""What streams must order: copies beside the computation, memory that is used again, collectives.

On a simulated device a missing wait gives wrong numbers, and each use that nothing orders fails its
test. `hatch run waits` takes away one wait at a time and says which of these tests sees it.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, Final

import parity
import pytest
import torch
import waits
import zero_ckpt
import zero_engine
import zero_offload
from parity import ZeroConfig
from residences import is_same
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import on_cpu
from zero_engine import Offload
from zero_offload.testing import OffloadedShards
from zero_partition import StateKind

on_a_device = pytest.mark.skipif(
    "config.getoption('device') == 'cpu'", reason="a CPU has no streams: see --device"
)
one_rank = pytest.mark.ranks(1)

WIDTH: Final = 64  # so that copies fill pages, by which uses of pinned memory are seen
NUM_STEPS: Final = 3


def _model(num_layers: int = 6) -> nn.Module:
    for step, micro, rank in itertools.product(range(NUM_STEPS + 4), range(2), range(2)):
        _batch(step, micro, rank)  # now: the host waits for copies to the device
    parity.seed_all(0)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(num_layers))
    )


@cache
def _batch(step: int, micro: int = 0, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    clip: Callable[[nn.Module], object] = lambda model: zero_engine.clip_grad_norm_(model, 0.5),
    *,
    rank: int = 0,
) -> None:
    """Two micro-batches, and a norm."""
    for micro in range(2):
        (model(_batch(step, micro, rank)) - 1).square().mean().backward()
    clip(model)
    optimizer.step()
    optimizer.zero_grad()


def _plain(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, num_steps: int = NUM_STEPS
) -> dict[str, Tensor]:
    """Return the weights that plain torch trains."""
    model = _model()
    optimizer = make(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        _step(
            model,
            optimizer,
            step,
            lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
        )
    return model.state_dict()


def _trained(
    group: Group,
    stage: int,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **offload: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    optimizer = make(model.parameters(), lr=1e-2)
    where = Offload(subgroup_bytes=2**14, **offload) if offload else None
    zero_engine.shard(
        model, optimizer, ZeroConfig(stage, min_unit_bytes=0, offload=where), group=group
    )
    for step in range(NUM_STEPS):
        _step(model, optimizer, step, rank=group.rank)
    return model, optimizer


def _assert_same(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    gc.collect()  # memory that is given back must not be in use
    torch.accelerator.synchronize()
    different = [
        key for key in expected if not is_same(on_cpu(weights[key]), on_cpu(expected[key]))
    ]
    assert not different, different


# ---- Training with residence on the host or disk, one rank ----

RESIDENCES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "stage 1, optimizer on host": (1, {"optimizer": "host"}),
    "stage 2, half on host": (2, {"optimizer": "host", "fraction": 0.5}),
    "stage 2, half on disk": (2, {"optimizer": "disk", "fraction": 0.5}),
    "stage 3, parameters on host": (3, {"params": "host"}),
    "stage 3, parameters on disk": (3, {"params": "disk"}),
    "stage 3, both on host": (3, {"params": "host", "optimizer": "host"}),
    "stage 3, both on disk": (3, {"params": "disk", "optimizer": "disk"}),
    "stage 3, half on host": (3, {"params": "host", "optimizer": "host", "fraction": 0.5}),
}


@on_a_device
@one_rank
@pytest.mark.parametrize("name", RESIDENCES)
def test_what_rests_on_the_host_is_waited_for(group: Group, name: str, tmp_path: Path) -> None:
    """Shards that come, gradients that leave, values that return."""
    stage, places = RESIDENCES[name]
    path = {"path": tmp_path} if "disk" in places.values() else {}
    model, optimizer = _trained(group, stage, **places, **path)
    zero_engine.full_optimizer_state_dict(model)
    zero_engine.unshard(model, optimizer)
    _assert_same(model.state_dict(), _plain())


@on_a_device
@one_rank
@pytest.mark.parametrize(
    ("stage", "places"),
    [
        (2, {"optimizer": "host"}),
        (3, {"params": "host", "optimizer": "host"}),
        (3, {"params": "host", "optimizer": "host", "fraction": 0.5}),
    ],
)
def test_a_delayed_update_waits_and_is_waited_for(
    group: Group, stage: int, places: dict[str, Any]
) -> None:
    """It reads gradients of the stream that computes, which then uses what it wrote."""
    model, _ = _trained(group, stage, delayed_update=True, **places)
    zero_engine.finish_update(model)
    weights = zero_engine.full_state_dict(model)
    late, trained = _model(), _model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        for micro in range(2):
            (late(_batch(step, micro)) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(late.parameters(), 0.5)
        late.load_state_dict(trained.state_dict())  # the update of the step before
        for param, used in zip(trained.parameters(), late.parameters(), strict=True):
            param.grad, used.grad = used.grad, None
        optimizer.step()
    _assert_same(weights, trained.state_dict())


@on_a_device
@one_rank
def test_a_parameter_on_the_host_is_written_after_it_was_read(group: Group) -> None:
    """Its copy to the device may be under way still."""
    model, _ = _trained(group, 3, params="host")
    plain = _model()
    plain.load_state_dict(_plain())
    name, weight = "2.1.weight", torch.ones(WIDTH, WIDTH, device="cpu")
    with torch.no_grad():
        first = model(_batch(5))
        zero_engine.set_full_param(model.get_parameter(name), weight)
        found = model(_batch(5))
        expected = plain(_batch(5))
        plain.get_parameter(name).copy_(weight)
        _assert_same({"1": first, "2": found}, {"1": expected, "2": plain(_batch(5))})


@on_a_device
@one_rank
def test_the_host_opens_a_shard_after_what_the_device_wrote(group: Group) -> None:
    """A step on the device sends its new values, and does not wait."""
    shards = OffloadedShards(zero_offload.HostArena("shards"))
    shards.allocate({0: torch.empty(2**14, device="meta")})
    shards.write(0, torch.ones(2**14, device=group.device) * 2)
    opened = shards.open(0, reads=True).clone()
    shards.close(0)
    shards.end()
    assert opened.unique().tolist() == [2]


@on_a_device
@one_rank
def test_memory_of_a_copy_that_nobody_waits_for_is_not_used_again(group: Group) -> None:
    """An exception may come between the two, and slots are given back then."""
    shards = OffloadedShards(zero_offload.HostArena("shards"))
    shards.allocate({0: torch.empty(2**14, device="meta")})
    shards.write(0, torch.ones(2**14, device=group.device))
    into = torch.empty(2**14, device=group.device)
    shards.read(0, into)  # and not wait()
    del into
    others = [torch.zeros(2**14, device=group.device) for _ in range(3)]
    torch.accelerator.synchronize()
    assert not any(other.any() for other in others)
    shards.end()


@on_a_device
@one_rank
def test_a_forward_before_the_step_computes_with_what_was_before(group: Group) -> None:
    """The host overwrites shards that may be on their way to the device."""
    model, optimizer = _trained(group, 3, params="host", optimizer="host")
    plain = _model()
    plain.load_state_dict(_plain())
    (model(_batch(4)) - 1).square().mean().backward()
    with torch.no_grad():
        found = model(_batch(5))
        optimizer.step()
        _assert_same({"output": found}, {"output": plain(_batch(5))})


@on_a_device
@one_rank
def test_an_offloaded_optimizer_waits(group: Group) -> None:
    """Alone, without the engine: gradients leave during backward, sub-groups pass through."""
    del group
    model = _model()
    optimizer = zero_offload.OffloadedOptimizer(
        list(model.parameters()), torch.optim.AdamW, subgroup_bytes=2**14, small_bytes=0, lr=1e-2
    )
    for step in range(NUM_STEPS):
        _step(model, optimizer, step, lambda model: optimizer.clip_grad_norm_(0.5))
    optimizer.close()
    _assert_same(model.state_dict(), _plain())


@on_a_device
def test_page_locked_memory_is_given_back_after_the_copies_of_its_device(group: Group) -> None:
    """In another thread the current device is the first one, which is another rank's."""
    memory = [zero_offload.HostArena("copies").allocate(2**16)]
    memory[0].copy_(torch.ones(2**16, dtype=torch.uint8), non_blocking=True)
    copied = torch.accelerator.current_stream(group.device).record_event()
    thread = Thread(target=memory.clear)
    thread.start()
    thread.join()
    assert copied.query()


# ---- Between phases ----


@on_a_device
@one_rank
@pytest.mark.parametrize("waits_for_it", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_states_that_are_offloaded_are_waited_for(
    group: Group, waits_for_it: bool, elsewhere: bool
) -> None:
    """Memory is given back while copies from it are under way, also to another stream's tensors."""
    model, optimizer = _trained(group, 2)
    main = torch.accelerator.current_stream()
    used = torch.Stream(group.device) if elsewhere else main
    for step in (NUM_STEPS, NUM_STEPS + 1):
        used.wait_stream(main)
        with used:
            zero_engine.offload_states(model, non_blocking=not waits_for_it)
        others = [torch.full((n,), torch.nan) for n in (64, 128, 4096, 4160, 24_960)]
        del others
        main.wait_stream(used)
        with used:
            zero_engine.reload_states(model, non_blocking=not waits_for_it)
        main.wait_stream(used)
        _step(model, optimizer, step)
    _assert_same(zero_engine.full_state_dict(model), _plain(num_steps=NUM_STEPS + 2))


# ---- Activations ----


def _gradients(model: nn.Module, steps: int, streams: list[Any]) -> dict[str, Tensor]:
    found = {}
    for step in range(steps):
        stream = streams[step % len(streams)]
        with stream:
            inputs = _batch(step).requires_grad_()
            grads = torch.autograd.grad(model(inputs).square().mean(), inputs)
            found[str(step)] = grads[0]
    return found


@on_a_device
@one_rank
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("num_slots", [None, 6])
@pytest.mark.parametrize("num_streams", [1, 2])
def test_inputs_that_are_kept_are_waited_for(
    group: Group, num_slots: int | None, num_streams: int, on_host: bool
) -> None:
    """They leave while the next layer computes, and return while the one before is due."""
    main = torch.accelerator.current_stream()
    streams = [main, torch.Stream(group.device)][:num_streams]
    plain, model = _model(), _model()
    saver = zero_ckpt.PackedSaver(on_host=on_host, num_slots=num_slots)
    zero_ckpt.checkpoint_modules(
        model, zero_ckpt.by_name("?"), checkpointer=zero_ckpt.Checkpointer(saver=saver)
    )
    streams[-1].wait_stream(main)
    found = _gradients(model, 4, streams)
    main.wait_stream(streams[-1])
    _assert_same(found, _gradients(plain, 4, [main]))


# ---- Checkpoints ----


@on_a_device
@one_rank
@pytest.mark.parametrize("overlap", [True, False])
def test_a_save_in_the_background_is_waited_for(
    group: Group, overlap: bool, tmp_path: Path
) -> None:
    """It copies what the step before has written, and what the next one writes."""
    model, optimizer = _trained(group, 2)
    with zero_engine.Saver(tmp_path, model, optimizer, overlap=overlap) as saver:
        for step in range(NUM_STEPS, NUM_STEPS + 3):  # without a word from the device to the host
            _step(model, optimizer, step)
            saver.save(step=step)
        _step(model, optimizer, NUM_STEPS + 3)
    zero_engine.load(tmp_path, model, optimizer)
    _assert_same(zero_engine.full_state_dict(model), _plain(num_steps=NUM_STEPS + 3))


# ---- The engine ----


@on_a_device
@one_rank
def test_whether_a_step_was_applied_is_waited_for(group: Group) -> None:
    """The loss scale follows, and the schedule."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "fused": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100},
    }
    engine, *_ = zero_engine.initialize(model=_model(), config=config, group=group)
    scales, applied = [], []
    for step in range(6):
        factor = torch.inf if step in (1, 4) else 1.0
        engine.backward(engine(_batch(step).half()).float().square().mean() * factor)
        engine.step()
        applied.append(engine.was_step_applied())
        scales.append(engine.cur_scale)
    assert applied == [True, False, True, True, False, True]
    assert engine.skipped_steps == 2
    assert scales[-1] < scales[0]


# ---- Several ranks ----


@on_a_device
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"params": "host", "optimizer": "host"}),
    ],
)
def test_collectives_are_waited_for(group: Group, stage: int, offload: dict[str, Any]) -> None:
    """Gathers that are launched ahead, reductions during backward, slots that are used again."""
    model, optimizer = _trained(group, stage, **offload)
    for step in (NUM_STEPS, NUM_STEPS + 1):
        if not offload:
            zero_engine.offload_states(model, [StateKind.PARAMS])
            zero_engine.reload_states(model)
        _step(model, optimizer, step, rank=group.rank)
    weights = zero_engine.full_state_dict(model)

    plain = _model()
    trained = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(NUM_STEPS + 2):
        for micro in range(2):
            losses = [(plain(_batch(step, micro, rank)) - 1).square().mean() for rank in range(2)]
            (sum(losses) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        trained.step()
        trained.zero_grad()
    if group.rank == 0:
        _assert_same(weights, plain.state_dict())


# ---- The table of waits ----


def test_each_wait_of_the_library_is_in_the_table_with_the_test_that_sees_it() -> None:
    """A wait that no test sees is not needed, or is going to be lost."""
    tables = waits.SEES.values(), waits.NO_ORDER.values()
    assert {wait.key for wait in waits.find()} == set(itertools.chain(*tables[0], *tables[1]))
    assert set(waits.SEES) <= globals().keys()
