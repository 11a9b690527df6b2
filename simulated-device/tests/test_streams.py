"""Streams and events, and when tasks run: modes, seeds, time."""

from __future__ import annotations

import time

import pytest
import simulated_device
import torch
from torch import Tensor

DEVICE = torch.device("sim", 0)


def a_tangle() -> Tensor:
    """Return what three streams without waits make of one tensor: it depends on their order."""
    streams = [torch.Stream(DEVICE) for _ in range(3)]
    state = torch.zeros(64, device="sim")
    torch.accelerator.synchronize()
    for step in range(30):
        with streams[step % 3]:
            state.mul_(3).add_(step)
    torch.accelerator.synchronize()
    return state.cpu()


def test_late_tasks_run_when_somebody_must_have_them():
    simulated_device.set_mode("late")
    tensor = torch.ones(3, device="sim")
    event = torch.Event(DEVICE)
    event.record()
    assert not event.query()
    assert not torch.accelerator.current_stream().query()
    assert tensor.sum().item() == 3
    assert event.query()


def test_eager_tasks_have_run_when_they_are_launched():
    simulated_device.set_mode("eager")
    torch.ones(3, device="sim")
    assert torch.accelerator.current_stream().query()


def test_an_event_that_is_asked_again_and_again_comes_true():
    torch.ones(3, device="sim")
    event = torch.Event(DEVICE)
    event.record()
    assert [event.query() for _ in range(4)][-1]


def test_random_order_is_repeatable_by_its_seed():
    def tangle(seed: int) -> Tensor:
        simulated_device.set_mode("random", seed=seed, chance=0.5)
        return a_tangle()

    results = [tangle(seed) for seed in range(6)]
    assert all(torch.equal(tangle(seed), results[seed]) for seed in range(6))
    assert len({tuple(result.tolist()) for result in results}) > 1


@pytest.mark.parametrize("chance", [-0.1, 1.0])
def test_a_chance_must_end(chance: float):
    with pytest.raises(ValueError, match="chance"):
        simulated_device.set_mode("random", chance=chance)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="eager, late, random or timed"):
        simulated_device.set_mode("later")  # type: ignore[arg-type]


def test_a_mode_takes_over_when_the_queues_are_empty():
    simulated_device.set_mode("late")
    torch.ones(3, device="sim")
    assert not torch.accelerator.current_stream().query()
    simulated_device.set_mode("late")
    assert torch.accelerator.current_stream().query()


def test_a_wait_orders_what_comes_after_it_and_nothing_before():
    side, event = torch.Stream(DEVICE), torch.Event(DEVICE)
    first = torch.ones(3, device="sim")
    event.record()
    second = torch.ones(3, device="sim")
    with side:
        side.wait_event(event)
        first.add_(1)
        second.add_(1)
    assert len(simulated_device.take_unordered_uses()) == 1


def test_orders_pass_through_chains_of_events():
    streams = [torch.Stream(DEVICE) for _ in range(4)]
    tensor = torch.ones(3, device="sim")
    previous = torch.accelerator.current_stream()
    for stream in streams:
        stream.wait_stream(previous)
        previous = stream
    with streams[-1]:
        tensor.add_(1)
        streams[-1].synchronize()
    assert tensor.tolist() == [2, 2, 2]
    assert simulated_device.take_unordered_uses() == []


def test_two_readers_need_no_order():
    tensor, side = torch.ones(3, device="sim"), torch.Stream(DEVICE)
    torch.accelerator.synchronize()
    results = [tensor + 1]
    with side:
        results.append(tensor + 2)
    torch.accelerator.synchronize()
    assert simulated_device.take_unordered_uses() == []


def test_parts_that_do_not_overlap_need_no_order():
    tensor, side = torch.ones(8, device="sim"), torch.Stream(DEVICE)
    torch.accelerator.synchronize()
    tensor[:4].add_(1)
    with side:
        tensor[4:].add_(2)
    torch.accelerator.synchronize()
    assert tensor.tolist() == [2] * 4 + [3] * 4
    assert simulated_device.take_unordered_uses() == []


def test_without_orders_nothing_is_looked_for():
    simulated_device.set_options(orders=False)
    tensor, side = torch.ones(3, device="sim"), torch.Stream(DEVICE)
    with side:
        tensor.add_(1)
    torch.accelerator.synchronize()
    assert simulated_device.take_unordered_uses() == []


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_elapsed_time_is_the_time_between_tasks(mode: str):
    simulated_device.set_mode(mode)
    events = [torch.Event(DEVICE, enable_timing=True) for _ in range(3)]
    events[0].record()
    for _ in range(20):
        torch.randn(300, 300, device="sim") @ torch.randn(300, 300, device="sim")
    events[1].record()
    before = time.perf_counter()
    if mode == "late":
        with pytest.raises(RuntimeError, match="completed"):
            events[0].elapsed_time(events[1])
    torch.accelerator.synchronize()
    events[2].record()
    torch.accelerator.synchronize()
    first, second = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
    assert 0 < first < 20_000
    assert 0 <= second <= 1000 * (time.perf_counter() - before)


def test_the_current_stream_is_a_threads_own():
    import threading

    default, side, seen = torch.accelerator.current_stream(), torch.Stream(DEVICE), []
    with side:
        thread = threading.Thread(
            target=lambda: seen.append(torch.accelerator.current_stream() == default)
        )
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream() == side
    assert seen == [True]
    assert torch.accelerator.current_stream() == default


# ---- host waits


def test_host_waits_are_counted_by_kind():
    tensor, pinned = torch.ones(8, device="sim"), torch.ones(8).pin_memory()
    stream, event = torch.accelerator.current_stream(), torch.Event(DEVICE)
    simulated_device.take_host_waits()
    tensor.sum().item()
    bool((tensor > 0).all())
    tensor.cpu()
    torch.empty(8).copy_(tensor, non_blocking=True)
    pinned.copy_(tensor.double(), non_blocking=True)  # by way of pageable memory
    pinned.to("sim")
    torch.ones(8).to("sim")
    tensor.nonzero()
    tensor[tensor > 0]
    event.record()
    event.synchronize()
    stream.synchronize()
    torch.accelerator.synchronize()
    assert simulated_device.take_host_waits() == {
        "item": 2,
        "copy D2H": 1,
        "copy D2H of pageable memory": 2,
        "copy H2D": 2,
        "aten::nonzero": 1,
        "aten::index": 1,
        "event.synchronize": 1,
        "stream.synchronize": 1,
        "synchronize": 1,
    }
    assert simulated_device.take_host_waits() == {}


def test_what_is_asynchronous_is_no_host_wait():
    tensor, pinned = torch.ones(8, device="sim"), torch.ones(8).pin_memory()
    indices = torch.tensor([1, 2], device="sim")
    simulated_device.take_host_waits()
    pinned.to("sim", non_blocking=True)
    tensor.to("cpu", non_blocking=True)
    torch.ones(8).to("sim", non_blocking=True)
    pinned.copy_(tensor, non_blocking=True)
    tensor[indices] = 0
    tensor.clamp_(0, 1).masked_fill_(tensor > 2, 0.5)
    torch.Event(DEVICE).record()
    assert simulated_device.take_host_waits() == {}


def test_pageable_memory_is_read_before_a_copy_returns():
    host = torch.ones(8)
    copied = host.to("sim", non_blocking=True)
    host.zero_()
    assert copied.tolist() == [1] * 8


def test_pinned_memory_is_read_before_a_copy_that_converts_returns():
    host = torch.ones(8).pin_memory()
    copied = torch.empty(8, dtype=torch.float64, device="sim").copy_(host, non_blocking=True)
    host.zero_()
    assert copied.tolist() == [1] * 8


def test_strict_pageable_copies_do_not_wait():
    simulated_device.set_options(strict_pageable=True)
    host, tensor = torch.zeros(8), torch.ones(8, device="sim")
    host.copy_(tensor, non_blocking=True)
    assert simulated_device.take_host_waits() == {}
    assert host.sum() == 0
    torch.accelerator.synchronize()
    assert host.sum() == 8


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_steady_step_makes_the_host_wait_for_nothing(name: str):
    from test_operators import transformer

    model = transformer().to("sim")
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, foreach=True)
    tokens = torch.randint(11, (2, 6), device="sim")
    for step in range(4):
        if step == 2:
            simulated_device.take_host_waits()
        outputs = model(tokens)
        torch.nn.functional.cross_entropy(outputs.flatten(0, 1), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert simulated_device.take_host_waits() == {}
    assert simulated_device.kernels_without_meta() == {}


def test_a_debug_mode_warns_or_raises_where_the_host_waits():
    tensor = torch.ones(3, device="sim")
    simulated_device.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="the host waits for the device: item"):
        tensor.sum().item()
    torch.accelerator.synchronize()
    simulated_device.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="copy D2H"):
        tensor.cpu()
    simulated_device.set_sync_debug_mode("default")
    assert tensor.tolist() == [1, 1, 1]
