"""What a rank does has a name in profilers, and costs nothing where none looks."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType

import parity
import pytest
import torch
import zero_comm
import zero_engine
from parity import ZeroConfig
from residences import host_adam
from torch.profiler import ProfilerActivity, profile
from zero_comm import Group
from zero_engine import Offload
from zero_partition import schedule_report


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_chrome_trace_names_each_gather_and_reduction(
    group: Group, stage: int, tmp_path: Path
) -> None:
    """As often as they happen: the schedule says which gathers a step has."""
    model, optimizer = parity.shard_chain(group, ZeroConfig(stage))
    for _ in range(2):
        parity.step_chain(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        parity.step_chain(model, optimizer)
    path = tmp_path / f"{group.rank}.json"
    profiler.export_chrome_trace(str(path))

    events = json.loads(path.read_text())["traceEvents"]
    found = Counter(event["name"] for event in events if event.get("name", "").startswith("zero::"))
    gathers = Counter(f"zero::gather {row.unit}" for row in schedule_report(model).rows)
    units = [f"layers.{index}" for index in range(4)]
    assert {name: found[name] for name in gathers} == gathers
    assert sum(found[f"zero::gather {unit}"] for unit in units) == gathers.total()
    for unit in units:
        assert found[f"zero::reduce {unit}"] == 1
        assert found[f"zero::reduce wait {unit}"] >= 1
    assert found["zero::step"] == 1
    assert found["zero::publish"] == 1


@pytest.mark.ranks(1)
def test_a_step_makes_the_calls_of_before_once_no_profiler_runs(group: Group) -> None:
    """Ranges that stayed would cost every step that follows."""
    model, optimizer = parity.shard_chain(group, ZeroConfig(3))
    for _ in range(3):
        parity.step_chain(model, optimizer)

    def calls() -> int:
        counted = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal counted
            code = frame.f_code
            # Of objects that go, autograd's thread of a device drops some.
            is_ours = "/zero_" in code.co_filename and code.co_name != "__del__"
            counted += event == "call" and is_ours

        gc.collect()  # what a collection finishes would be counted where it happens to come
        gc.disable()
        sys.setprofile(count)
        try:
            parity.step_chain(model, optimizer)
        finally:
            sys.setprofile(None)
            gc.enable()
        return counted

    before = calls()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        during = calls()
    parity.step_chain(model, optimizer)  # whose forward sees that none runs any more
    assert calls() == before < during


def test_what_comes_from_disk_and_goes_there_has_a_name(group: Group, tmp_path: Path) -> None:
    """State of the optimizer by sub-group, parameters by shard."""
    model = parity.build(partial(parity.Chain, num_blocks=3, width=512))
    optimizer = host_adam(model.parameters())
    offload = Offload(optimizer="disk", params="disk", path=tmp_path, subgroup_bytes=2**20)
    zero_engine.shard(model, optimizer, ZeroConfig(3, offload=offload), group=group)
    for step in range(3):
        with (
            profile(activities=[ProfilerActivity.CPU], acc_events=True)
            if step == 2
            else nullcontext() as profiler
        ):
            parity.finish_step(model(torch.ones(1, 512)).sum(), optimizer)
    found = {event.key for event in profiler.key_averages() if event.key.startswith("zero::swap")}
    assert {name.split("-")[0] for name in found} >= {
        *(f"zero::{what} optimizer" for what in ("swap_in", "swap_in wait", "swap_out")),
        *(f"zero::{what} parameters" for what in ("swap_in", "swap_out", "swap_out wait")),
    }


@pytest.mark.parametrize("stage", [0, 2])
def test_a_message_may_be_on_its_way_when_a_profiler_ends(group: Group, stage: int) -> None:
    """PyTorch writes to freed memory when it is waited for then; the process ended by a signal."""
    model, optimizer = parity.shard_chain(group, ZeroConfig(stage))
    for _ in range(5):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            parity.step_chain(model, optimizer)
        parity.step_chain(model, optimizer)
        profiler.key_averages()
        del profiler
        gc.collect()


def test_no_message_leaves_an_event_that_it_would_end_later(group: Group) -> None:
    """Whatever began it: sums, gathers and broadcasts."""
    buffer = torch.zeros(4)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        zero_comm.all_reduce_flat(buffer, group=group).wait()
        zero_comm.broadcast_flat(buffer, src=0, group=group).wait()

    assert not [event.key for event in profiler.key_averages() if "gloo" in event.key]
