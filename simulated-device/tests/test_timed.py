"""The timed mode: when tasks would have run, by the rates that were given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import simulated_device
import torch
import torch.nn.functional as F
from simulated_device import Rates, Span

RATES = Rates(
    memory=1e12,
    products={"bfloat16": 1e14, "float16": 1e14, "float32": 1e13},
    host_link=1e10,
    node_link=1e11,
    network=1e9,
    launch_s=0.0,
    host_factor=0.0,
    kernel_s=0.0,
    node_hop_s=0.0,
    network_hop_s=0.0,
)


@pytest.fixture(autouse=True)
def timed() -> Iterator[None]:
    simulated_device.time_on(RATES)
    yield
    simulated_device.set_mode("late")


def seconds_of(span: Span) -> float:
    return span.end - span.start


def test_a_kernel_takes_as_long_as_its_bytes_or_its_operations():
    a, b = (torch.empty(1000, 1000, device="sim") for _ in range(2))
    simulated_device.take_spans()
    _ = a + b
    _ = a @ b
    _ = a.bfloat16() @ b.bfloat16()
    add, product, *_, of_bf16 = simulated_device.take_spans()
    assert seconds_of(add) == pytest.approx(3 * 4e6 / 1e12)
    assert seconds_of(product) == pytest.approx(2e9 / 1e13)
    assert seconds_of(of_bf16) == pytest.approx(2e9 / 1e14)


def test_what_is_written_in_place_is_read_too():
    a = torch.empty(1000, 1000, device="sim")
    simulated_device.take_spans()
    a.mul_(2)
    (only,) = simulated_device.take_spans()
    assert seconds_of(only) == pytest.approx(2 * 4e6 / 1e12)


def test_efficiency_is_of_products_alone():
    simulated_device.time_on(RATES.with_efficiency(0.5))
    a, b = (torch.empty(1000, 1000, device="sim") for _ in range(2))
    simulated_device.take_spans()
    _ = a + b
    _ = a @ b
    add, product = simulated_device.take_spans()
    assert seconds_of(add) == pytest.approx(3 * 4e6 / 1e12)
    assert seconds_of(product) == pytest.approx(2e9 / 5e12)


def test_streams_run_beside_each_other_and_wait_where_they_are_told_to():
    a = torch.empty(1000, 1000, device="sim")
    side = torch.Stream("sim")
    simulated_device.take_spans()
    _ = a @ a
    with side:
        _ = a + a
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        _ = a + a
    product, beside, after = simulated_device.take_spans()
    assert product.start == beside.start
    assert after.start == product.end > beside.end


def test_the_host_goes_on_until_it_waits_and_launches_take_its_time():
    simulated_device.time_on(replace(RATES, launch_s=1e-3))
    a = torch.empty(1000, 1000, device="sim")
    simulated_device.take_spans()
    start = simulated_device.host_seconds()
    _ = a @ a
    _ = a @ a
    assert simulated_device.host_seconds() - start == pytest.approx(2e-3)
    first, second = simulated_device.take_spans()
    assert second.start - first.start == pytest.approx(1e-3)  # the host is slower than the device
    torch.accelerator.synchronize()
    assert simulated_device.host_seconds() == second.end


def test_the_hosts_own_time_counts_as_often_as_its_factor_says():
    def spent(factor: float) -> float:
        simulated_device.time_on(replace(RATES, host_factor=factor))
        a = torch.empty(1, device="sim")
        start = simulated_device.host_seconds()
        sum(range(300_000))
        a.add_(1)
        return simulated_device.host_seconds() - start

    assert spent(0.0) == 0.0
    assert spent(1000.0) > 10 * spent(1.0) > 0.0


def test_copies_take_the_link_of_the_host():
    a, there = torch.empty(1000, 1000, device="sim"), torch.empty(1000, 1000)
    simulated_device.take_spans()
    a.copy_(there)
    there.copy_(a)
    for span in simulated_device.take_spans():
        assert seconds_of(span) == pytest.approx(4e6 / 1e10)


def test_events_tell_the_time_of_the_clock():
    first, second = (torch.Event("sim", enable_timing=True) for _ in range(2))
    a = torch.empty(1000, 1000, device="sim")
    first.record()
    _ = a @ a
    second.record()
    torch.accelerator.synchronize()
    assert first.elapsed_time(second) == pytest.approx(0.2)


def test_large_tensors_cost_no_memory_and_small_ones_have_values():
    large = torch.empty(1 << 31, device="sim", dtype=torch.uint8)
    assert large.add(1).numel() == 1 << 31
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert resident < 1 << 31
    assert (torch.tensor([1, 2], device="sim") * 3).tolist() == [3, 6]


def test_attention_is_one_kernel_each_way():
    query, key, value = (
        torch.empty(2, 4, 1024, 64, device="sim", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    simulated_device.take_spans()
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    forward, *_ = simulated_device.take_spans()
    out.backward(torch.empty_like(out))
    backward = [s for s in simulated_device.take_spans() if s.name == "aten::attention_backward"]
    operations = 4 * 2 * 4 * 1024 * 1024 * 64 / 2
    assert seconds_of(forward) == pytest.approx(operations / 1e14)
    assert [seconds_of(span) for span in backward] == [pytest.approx(2.5 * operations / 1e14)]
    assert query.grad is not None
    assert query.grad.shape == query.shape


ALONE = """
import simulated_device, torch, torch.distributed as dist
from test_timed import RATES
from torch.testing._internal.distributed.fake_pg import FakeStore

simulated_device.time_on(RATES)
dist.init_process_group("cpu:gloo,sim:simccl", store=FakeStore(), rank=0, world_size=16)
group = dist.new_group(list(range(8)))  # of one node

def seconds(name, call):
    simulated_device.take_spans()
    call()
    (span,) = [s for s in simulated_device.take_spans() if s.name.startswith(name)]
    return span.end - span.start

own, whole = torch.empty(1 << 22, device="sim"), torch.empty(1 << 26, device="sim")
passed = 15 * own.nbytes  # from neighbour to neighbour
entering = whole.nbytes / 2 / (8 * 1e9)  # half of it lies on the other node
assert entering > passed / 1e11
took = seconds("all_gather", lambda: dist.all_gather_into_tensor(whole, own))
assert abs(took - entering) < 1e-9, took
took = seconds("reduce_scatter", lambda: dist.reduce_scatter_tensor(own, whole))
assert abs(took - entering) < 1e-9, took
half = whole[: 1 << 25]
took = seconds("all_gather", lambda: dist.all_gather_into_tensor(half, own, group=group))
assert abs(took - 7 * own.nbytes / 1e11) < 1e-9, took
took = seconds("all_reduce", lambda: dist.all_reduce(own, group=group))
assert abs(took - 2 * 7 / 8 * own.nbytes / 1e11) < 1e-9, took

flags = torch.ones(3, device="sim")
dist.all_reduce(flags)
assert flags.tolist() == [16.0] * 3
names = [None] * 16
dist.all_gather_object(names, "every rank is this one")
assert set(names) == {"every rank is this one"}
"""


def test_one_process_stands_for_a_cluster():
    """Collectives take the slower of the links that they pass; small ones have values."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))},
    )
    assert ran.returncode == 0, ran.stderr
