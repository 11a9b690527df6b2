"""Memory: its rights, its poison, its statistics, and its limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import simulated_device
import torch
from torch import Tensor

DEVICE = torch.device("sim", 0)


def rounded(size: int) -> int:
    """Return how many bytes a block of `size` bytes has: the allocator's documented rounding."""
    small = -(-size // 512) * 512
    return -(-small // (256 << 10)) * (256 << 10) if small > 1 << 20 else small


def run(program: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), **changes}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def allocated() -> int:
    return torch.accelerator.memory_allocated(DEVICE)


# ---- rights


@pytest.mark.parametrize("touch", ["ctypes.string_at(p, 1)", "ctypes.memset(p, 0, 1)"])
def test_a_host_that_touches_device_memory_dies(touch: str):
    program = (
        "import ctypes, signal, sys, torch, simulated_device\n"
        "t = torch.ones(8, device='sim'); torch.accelerator.synchronize(); p = t.data_ptr()\n"
        f"print('before', flush=True); {touch}; print('after', flush=True)\n"
    )
    ran = run(program)
    assert ran.stdout == "before\n"
    assert ran.returncode == -11, ran.stderr


# ---- poison


def test_memory_that_was_never_written_is_nan():
    assert torch.empty(1000, device="sim").isnan().all().item()


@pytest.mark.parametrize("mode", ["eager", "late", "random"])
def test_freed_memory_is_nan_for_its_next_owner(mode: str):
    simulated_device.set_mode(mode)
    first = torch.ones(1000, device="sim")
    address = first.data_ptr()
    del first
    second = torch.empty(1000, device="sim")
    assert second.data_ptr() == address
    assert second.isnan().all().item()


def test_a_kernel_launched_before_a_free_reads_the_old_values():
    first = torch.ones(1000, device="sim")
    result = first + 1
    del first
    assert (result == 2).all().item()


def test_without_poison_freed_memory_keeps_its_values():
    simulated_device.set_options(poison=False)
    first = torch.ones(1000, device="sim")
    del first
    assert (torch.empty(1000, device="sim") == 1).all().item()


def test_memory_is_handed_on_within_its_stream_only():
    first = torch.ones(5000, device="sim")
    address = first.data_ptr()
    del first
    with torch.Stream(DEVICE):
        assert torch.empty(5000, device="sim").data_ptr() != address
    assert torch.empty(5000, device="sim").data_ptr() == address


def test_another_stream_may_use_memory_after_its_last_use():
    """It need not wait for what comes later on the memory's own stream."""
    side, event = torch.Stream(DEVICE), torch.Event(DEVICE)
    earlier = torch.ones(9000, device="sim")
    address = earlier.data_ptr()
    event.record()
    torch.ones(9, device="sim")
    del earlier
    result = torch.empty(9000, device="sim")
    assert result.data_ptr() == address
    side.wait_event(event)
    with side:
        result.fill_(3)
        side.synchronize()
    torch.accelerator.synchronize()
    assert (result == 3).all().item()
    assert simulated_device.take_unordered_uses() == []


def test_recorded_memory_is_handed_on_when_the_other_stream_is_done():
    side = torch.Stream(DEVICE)
    first = torch.ones(7000, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        first.add_(1)
    first.record_stream(side)
    address = first.data_ptr()
    del first
    held = torch.empty(7000, device="sim")
    assert held.data_ptr() != address
    side.synchronize()
    assert torch.empty(7000, device="sim").data_ptr() == address


def test_emptied_memory_serves_other_sizes_and_streams():
    torch.sim.empty_cache()
    before = torch.accelerator.memory_reserved(DEVICE)
    big = torch.empty(1 << 20, device="sim")
    del big
    assert torch.accelerator.memory_reserved(DEVICE) == before + (4 << 20)
    torch.sim.empty_cache()
    assert torch.accelerator.memory_reserved(DEVICE) == before
    with torch.Stream(DEVICE):
        parts = [torch.full((1 << 18,), float(i), device="sim") for i in range(4)]
        assert [part[-1].item() for part in parts] == [0, 1, 2, 3]


# ---- statistics


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_allocated_bytes_are_exact_to_the_rounding(size: int):
    before = allocated()
    tensor = torch.empty(size, dtype=torch.uint8, device="sim")
    assert allocated() == before + rounded(size)
    del tensor
    assert allocated() == before


def test_peaks_and_counts_are_those_of_the_program():
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    before, counts = allocated(), torch.accelerator.memory_stats(DEVICE)
    first = torch.empty(1000, device="sim")
    second = torch.empty(3000, device="sim")
    del first
    third = torch.empty(100, device="sim")
    stats = torch.accelerator.memory_stats(DEVICE)
    assert torch.accelerator.max_memory_allocated(DEVICE) == before + rounded(4000) + rounded(12000)
    assert allocated() == before + rounded(12000) + rounded(400)
    name = "requested_bytes.all.current"
    assert stats[name] - counts[name] == second.nbytes + third.nbytes
    assert stats["allocation.all.current"] - counts["allocation.all.current"] == 2
    assert stats["allocation.all.allocated"] - counts["allocation.all.allocated"] == 3
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    assert torch.accelerator.max_memory_allocated(DEVICE) == allocated()


def test_late_kernels_keep_no_memory():
    """Peaks are those of the program's tensors, not of tasks that have not run."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    before = allocated()
    total = torch.zeros(1000, device="sim")
    for _ in range(50):
        total = total + torch.ones(1000, device="sim")
    assert torch.accelerator.max_memory_allocated(DEVICE) - before <= 3 * rounded(4000)
    assert (total == 50).all().item()


# ---- limit


def test_beyond_the_limit_is_out_of_memory():
    simulated_device.set_memory_limit(allocated() + 10 * 512)
    kept = torch.empty(10 * 128, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 1 bytes"):
        torch.empty(1, dtype=torch.uint8, device="sim")
    del kept
    torch.empty(1, device="sim")
    free, total = torch.accelerator.get_memory_info(DEVICE)
    assert total - free == allocated()


def test_a_device_that_is_full_frees_its_cache_first():
    program = (
        "import torch, simulated_device\n"
        "big = torch.empty(150 << 20, dtype=torch.uint8, device='sim'); del big\n"
        "with torch.Stream('sim'):\n"
        "    big = torch.empty(180 << 20, dtype=torch.uint8, device='sim')\n"
        "try:\n"
        "    torch.empty(100 << 20, dtype=torch.uint8, device='sim')\n"
        "except torch.OutOfMemoryError:\n"
        "    print('full')\n"
    )
    ran = run(program, SIM_GIB="0.25")
    assert ran.stdout == "full\n", ran.stderr


# ---- pinned memory


def test_pinned_memory_is_known():
    pinned = torch.arange(3000.0).pin_memory()
    assert pinned.is_pinned()
    assert pinned[5:].is_pinned()
    assert not torch.empty(3).is_pinned()
    assert torch.equal(pinned, torch.arange(3000.0))


def test_registered_memory_is_pinned_until_it_is_unregistered():
    tensor = torch.zeros(4096)
    torch.sim.host_register(tensor.data_ptr(), tensor.nbytes)
    assert tensor.is_pinned()
    tensor.copy_(torch.ones(4096, device="sim"), non_blocking=True)
    assert simulated_device.take_host_waits() == {}
    torch.accelerator.synchronize()
    assert (tensor == 1).all()
    torch.sim.host_unregister(tensor.data_ptr())
    assert not tensor.is_pinned()


def _round_trip(source: Tensor, host: Tensor) -> Tensor:
    host.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    return host.to("sim", non_blocking=True)


def test_a_host_may_read_pinned_memory_while_it_is_sent():
    host = torch.arange(4096.0).pin_memory()
    sent = host.to("sim", non_blocking=True)
    assert host.sum().item() == torch.arange(4096.0).sum().item()
    assert simulated_device.take_unordered_uses() == []
    assert torch.equal(sent.cpu(), torch.arange(4096.0))


def test_a_host_may_use_the_rest_of_a_pinned_buffer():
    buffer = torch.zeros(8 * 4096).pin_memory()
    sent = buffer[1000:9000].to("sim", non_blocking=True)
    buffer[:1000].fill_(1)
    buffer[9000:].fill_(2)
    assert simulated_device.take_unordered_uses() == []
    buffer[5000] = 3
    assert "the host writes pinned memory" in simulated_device.take_unordered_uses()[0]
    assert sent.sum().item() == 3


def test_pinned_memory_serves_system_calls_when_its_copies_are_over(tmp_path: Path):
    host = torch.zeros(4096).pin_memory()
    host.copy_(torch.ones(4096, device="sim"), non_blocking=True)
    torch.accelerator.synchronize()
    with (tmp_path / "file").open("wb") as file:
        assert os.write(file.fileno(), memoryview(host.numpy())) == host.nbytes


def test_pinned_memory_round_trips():
    source = torch.arange(4096.0, device="sim")
    result = _round_trip(source, torch.zeros(4096).pin_memory())
    assert torch.equal(result.cpu(), torch.arange(4096.0))
    assert simulated_device.take_unordered_uses() == []
