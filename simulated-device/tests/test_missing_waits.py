"""A missing wait is seen twice: as an unordered use in any mode, and as wrong numbers if late.

Each case is written once. With its wait, results are those of plain torch on the CPU in every mode,
and nothing is reported; without it, late streams give other numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import simulated_device
import torch
from ranks import Ranks
from torch import Tensor

N = 4096  # elements: several pages, as pinned memory is watched by whole pages


def values(start: int = 0) -> Tensor:
    return torch.arange(start, start + N, dtype=torch.float32)


def on_device(value: Tensor) -> Tensor:
    tensor = value.to("sim")
    torch.accelerator.synchronize()
    return tensor


def read_before_producer(waits: bool) -> Tensor:
    source, side = on_device(values()), torch.Stream("sim")
    produced = source + 1
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        result = produced * 2
        side.synchronize()
        return result.cpu()


def overwrite_before_reader(waits: bool) -> Tensor:
    source, side = on_device(values()), torch.Stream("sim")
    main = torch.accelerator.current_stream()
    with side:
        result = source + 1
    if waits:
        main.wait_stream(side)
    source.zero_()
    main.synchronize()
    with side:
        side.synchronize()
        return result.cpu() - 1


def free_while_in_use(waits: bool) -> Tensor:
    source, side = on_device(values()), torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        result = source + 1
    if waits:
        source.record_stream(side)
    del source
    # The next owner of the memory may use it at once.
    torch.zeros(N, device="sim")
    torch.accelerator.current_stream().synchronize()
    with side:
        side.synchronize()
        return result.cpu()


def read_pinned_copy(waits: bool) -> Tensor:
    source, host = on_device(values()), torch.zeros(N).pin_memory()
    host.copy_(source, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    return host.clone()


def overwrite_pinned_source(waits: bool) -> Tensor:
    host = values().pin_memory()
    target = host.to("sim", non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    host.zero_()
    return target.cpu()


def reuse_pinned_slot(waits: bool) -> Tensor:
    first, second, side = on_device(values()), on_device(values(7)), torch.Stream("sim")
    main = torch.accelerator.current_stream()
    slot = torch.zeros(N).pin_memory()
    slot.copy_(first, non_blocking=True)
    result = slot.to("sim", non_blocking=True)
    if waits:
        side.wait_stream(main)
    with side:
        slot.copy_(second, non_blocking=True)
        side.synchronize()
    main.synchronize()
    return result.cpu() + slot


def give_back_pinned_source(waits: bool) -> Tensor:
    pinned = values().pin_memory()
    # torch's allocator waits for copies of its own tensors only.
    owner = (ctypes.c_char * pinned.nbytes).from_address(pinned.data_ptr())
    target = torch.frombuffer(owner, dtype=torch.float32).to("sim", non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    del pinned
    next_owner = torch.zeros(N).pin_memory()
    return target.cpu() + next_owner


def record_event_too_early(waits: bool) -> Tensor:
    source, side, event = on_device(values()), torch.Stream("sim"), torch.Event("sim")
    if not waits:
        event.record()
    produced = source + 1
    if waits:
        event.record()
    side.wait_event(event)
    with side:
        result = produced * 2
        side.synchronize()
        return result.cpu()


def use_memory_of_another_stream(waits: bool) -> Tensor:
    side = torch.Stream("sim")
    earlier = on_device(values())
    earlier.add_(1)
    del earlier
    result = torch.empty(N, device="sim")  # the same memory
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        result.fill_(3)
        side.synchronize()
    torch.accelerator.current_stream().synchronize()
    return result.cpu()


CASES: dict[Callable[[bool], Tensor], Callable[[], Tensor]] = {
    read_before_producer: lambda: (values() + 1) * 2,
    overwrite_before_reader: values,
    free_while_in_use: lambda: values() + 1,
    read_pinned_copy: values,
    overwrite_pinned_source: values,
    reuse_pinned_slot: lambda: values() + values(7),
    give_back_pinned_source: values,
    record_event_too_early: lambda: (values() + 1) * 2,
    use_memory_of_another_stream: lambda: torch.full((N,), 3.0),
}
BY_NAME = {case.__name__: case for case in CASES}
MODES = ["eager", "late", "random"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BY_NAME)
def test_with_its_wait_each_case_is_right_and_silent(name: str, mode: str):
    case = BY_NAME[name]
    for seed in range(5):
        simulated_device.set_mode(mode, seed=seed)
        assert torch.equal(case(True), CASES[case]())
        assert simulated_device.take_unordered_uses() == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BY_NAME)
def test_without_its_wait_each_case_is_an_unordered_use(name: str, mode: str):
    simulated_device.set_mode(mode)
    BY_NAME[name](False)
    found = simulated_device.take_unordered_uses()
    assert any("nothing orders" in line or "freed while in use" in line for line in found), found


@pytest.mark.parametrize("name", BY_NAME)
def test_without_its_wait_late_streams_give_other_numbers(name: str):
    case = BY_NAME[name]
    assert not torch.equal(case(False), CASES[case]())


# ---- collectives


def use_result_of_a_collective(rank: int, waits: bool) -> Tensor:
    import torch.distributed as dist

    tensor = on_device(values(rank))
    work = dist.all_reduce(tensor, async_op=True)
    if waits:
        work.wait()
    result = tensor + 1
    torch.accelerator.current_stream().synchronize()
    work.wait()
    return result.cpu()


def overwrite_input_of_a_collective(rank: int, waits: bool) -> Tensor:
    import torch.distributed as dist

    tensor, result = on_device(values(rank)), torch.empty(2 * N, device="sim")
    work = dist.distributed_c10d._get_default_group()._allgather_base(result, tensor)
    if waits:
        work.wait()
    tensor.zero_()
    torch.accelerator.current_stream().synchronize()
    work.wait()
    return result.cpu()


COLLECTIVE_CASES = {
    use_result_of_a_collective: lambda: values(0) + values(1) + 1,
    overwrite_input_of_a_collective: lambda: torch.cat([values(0), values(1)]),
}


def collective_program(rank: int, name: str, waits: bool, mode: str) -> tuple[Tensor, list[str]]:
    simulated_device.set_mode(mode)
    return globals()[name](rank, waits), simulated_device.take_unordered_uses()


@pytest.mark.parametrize("case", COLLECTIVE_CASES, ids=lambda case: case.__name__)
def test_collectives_are_right_and_silent_with_their_wait(case: Callable, ranks: Ranks):
    for mode in MODES:
        for result, found in ranks.run(collective_program, case.__name__, True, mode):
            assert torch.equal(result, COLLECTIVE_CASES[case]())
            assert found == []


@pytest.mark.parametrize("case", COLLECTIVE_CASES, ids=lambda case: case.__name__)
def test_collectives_without_their_wait_are_seen(case: Callable, ranks: Ranks):
    for result, found in ranks.run(collective_program, case.__name__, False, "late"):
        assert not torch.equal(result, COLLECTIVE_CASES[case]())
        assert any("nothing orders" in line for line in found), found
