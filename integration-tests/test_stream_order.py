"""What CUDA's streams order, asserted without a GPU: memory is waited for before it is used again.

`fake_streams` says what it can see, and what it cannot.
"""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_ckpt
import zero_engine
import zero_offload
from fake_streams import Recorder, recording
from parity import ZeroConfig
from torch import nn
from zero_comm import Group
from zero_engine import Offload
from zero_partition import StateKind

pytestmark = pytest.mark.cpu_only("its streams are fakes on the CPU")

# ---- The fake itself ----


@pytest.mark.parametrize(
    "disorder", ["no wait", "host reads", "event too early", "device writes", "let go"]
)
def test_the_fake_finds_what_nothing_orders(disorder: str) -> None:
    """Else the tests below would say nothing."""
    with recording() as recorder:
        side, device, host = torch.cuda.Stream(), torch.ones(4, device="cuda"), torch.empty(4)
        event = side.record_event()
        if disorder != "no wait":
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(device, non_blocking=True)
        if disorder == "no wait":
            side.synchronize()
        if disorder == "event too early":
            event.synchronize()
        if disorder in ("host reads", "event too early"):
            host.add_(1)
        if disorder == "device writes":
            device.zero_()
        if disorder == "let go":
            del device
        gc.collect()
    assert recorder.problems


# ---- Training with residence on the host or disk, one rank ----


def _check(recorder: Recorder, *, copies_beside: bool = True) -> None:
    gc.collect()
    assert recorder.problems == []
    beside = [name for name in recorder.copies if name != "the default stream"]
    assert bool(beside) == copies_beside


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    rank: int = 0,
    device: str = "cuda",
) -> None:
    """Two micro-batches, and a norm."""
    for micro in range(2):
        data = tuple(each.to(device) for each in parity.batch(step, micro, rank))
        parity.loss_of(model, data).backward()
    zero_engine.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def _train_on_device(
    offload: Offload | None, *, device: str = "cuda", stage: int = 3
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(parity.tiny_float32).to(device)
    optimizer = torch.optim.SGD(parity.param_groups(model), lr=0.05, momentum=0.9)
    config = ZeroConfig(stage, offload=offload)
    zero_engine.shard(model, optimizer, config, group=Group.solo(device))
    for step in range(3):
        _step(model, optimizer, step, device=device)
    return model, optimizer


RESIDENCES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1, optimizer on host": (1, {"optimizer": "host"}),
    "stage 2, half on disk": (2, {"optimizer": "disk", "fraction": 0.5}),
    "stage 3, both on disk": (3, {"params": "disk", "optimizer": "disk"}),
    "stage 3, half on host": (3, {"params": "host", "optimizer": "host", "fraction": 0.5}),
    "stage 3, delayed": (3, {"params": "host", "optimizer": "host", "delayed_update": True}),
}


@pytest.mark.parametrize("name", RESIDENCES)
def test_what_rests_on_the_host_is_waited_for(name: str, tmp_path: Path) -> None:
    """Shards that come, gradients that leave, values that return."""
    stage, places = RESIDENCES[name]
    path = tmp_path if "disk" in places.values() else None
    offload = Offload(**places, path=path, subgroup_bytes=512)
    with recording() as recorder:
        model, optimizer = _train_on_device(offload, stage=stage)
        zero_engine.finish_update(model)
        zero_engine.full_optimizer_state_dict(model)
        zero_engine.unshard(model, optimizer)
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
    _check(recorder, copies_beside=stage == 3 or "fraction" not in places)
    if "delayed_update" not in places:
        plain, _ = _train_on_device(None, device="cpu", stage=stage)
        parity.assert_same_weights(weights, zero_engine.full_state_dict(plain), what=name)


def test_a_parameter_on_the_host_is_written_after_it_was_read() -> None:
    """Its copy to the device may be under way still; nothing but that has to be waited for."""
    with recording() as recorder:
        model, _ = _train_on_device(Offload(params="host"))
        tokens = parity.batch(9, 0, 0)[0].to("cuda")
        weight = torch.ones(13, parity.WIDTH)
        with torch.no_grad():
            model(tokens)
            zero_engine.set_full_param(model.get_submodule("blocks.2.up").weight, weight)
            model(tokens)
    _check(recorder)


def test_an_offloaded_optimizer_waits() -> None:
    """Alone, without the engine: gradients leave during backward, sub-groups pass through."""
    with recording() as recorder:
        model = parity.build(parity.tiny_float32).to("cuda")
        trained = [param for param in model.parameters() if param.requires_grad]
        options: dict[str, Any] = {"subgroup_bytes": 512, "small_bytes": 0, "lr": 0.01}
        optimizer = zero_offload.OffloadedOptimizer(trained, torch.optim.AdamW, **options)
        for step in range(3):
            for micro in range(3):
                data = tuple(each.to("cuda") for each in parity.batch(step, micro, 0))
                parity.loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    _check(recorder)


# ---- Between phases ----


@pytest.mark.parametrize("waits", [True, False])
def test_states_that_are_offloaded_are_waited_for(waits: bool) -> None:
    """Memory is given back while copies from it are under way."""
    with recording() as recorder:
        model, optimizer = _train_on_device(None, stage=2)
        for step in (3, 4):
            zero_engine.offload_states(model, non_blocking=not waits)
            zero_engine.reload_states(model, non_blocking=not waits)
            _step(model, optimizer, step)
    _check(recorder, copies_beside=False)


# ---- Activations ----


@pytest.mark.parametrize("num_slots", [None, 4])
def test_inputs_on_the_host_are_waited_for(num_slots: int | None) -> None:
    """They leave while the next layer computes, and return while the one before is due."""
    with recording() as recorder:
        model = parity.Chain(width=6).to("cuda")
        saver = zero_ckpt.PackedSaver(on_host=True, num_slots=num_slots)
        checkpointer = zero_ckpt.Checkpointer(saver=saver)
        zero_ckpt.checkpoint_modules(
            model, zero_ckpt.by_name("layers.*"), checkpointer=checkpointer
        )
        for _ in range(3):
            model(torch.randn(2, 6, device="cuda", requires_grad=True)).sum().backward()
    _check(recorder)


# ---- Checkpoints ----


@pytest.mark.parametrize("overlap", [True, False])
def test_a_save_in_the_background_is_waited_for(overlap: bool, tmp_path: Path) -> None:
    """It copies what the step before has written, and what the next one writes."""
    with recording() as recorder:
        model = parity.Chain(width=6).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        config = ZeroConfig(2)
        zero_engine.shard(model, optimizer, config, group=Group.solo("cuda"))
        with zero_engine.Saver(tmp_path, model, optimizer, overlap=overlap) as saver:
            for step in range(3):  # without a word from the device to the host
                model(torch.ones(2, 6, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                saver.save(step=step)
    _check(recorder, copies_beside=overlap)


# ---- Several ranks, as with NCCL ----


@pytest.mark.parametrize(
    ("stage", "place"), [(0, "device"), (2, "device"), (3, "device"), (3, "host")]
)
def test_collectives_are_waited_for(group: Group, stage: int, place: str) -> None:
    """Gathers that are launched ahead, reductions during backward, slots that are used again."""
    del group
    offload = Offload(params="host", optimizer="host", subgroup_bytes=512)
    with recording(nccl=True) as recorder:
        model = parity.build(parity.tiny_float32).to("cuda")
        optimizer = torch.optim.AdamW(parity.param_groups(model), lr=1e-2, foreach=False)
        config = ZeroConfig(stage, offload=offload if place == "host" else None, window=2)
        across = Group.from_process_group(device="cuda")
        assert across.backend.name == "nccl"
        zero_engine.shard(model, optimizer, config, group=across)
        for step in range(3):
            _step(model, optimizer, step, rank=across.rank)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a gather on its way would keep what it reads
                zero_engine.offload_states(model, [StateKind.PARAMS])
            zero_engine.reload_states(model)
        zero_engine.full_state_dict(model)
    _check(recorder, copies_beside=place == "host")
    assert recorder.num_collectives


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_steady_step_copies_nothing_from_the_host(group: Group, stage: int) -> None:
    """For a copy of pageable memory the host waits, and then the device does for the host."""
    del group
    with recording(nccl=True) as recorder:
        model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        across = Group.from_process_group(device="cuda")
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=across)
        data = torch.randn(2, 3, 4).to("cuda")
        for _ in range(3):
            recorder.copies.clear()
            for each in data:
                model(each).square().sum().backward()
            zero_engine.unscale_and_clip_(model, scale=2.0, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert not recorder.copies
