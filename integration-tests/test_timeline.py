"""A timeline: what each rank did when, and for whom the others waited."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import Group
from zero_engine import ConfigError, FileError
from zero_partition import StateError

SLOW_S = 1000.0


def _record(
    group: Group, monkeypatch: pytest.MonkeyPatch, *, stage: int, slow: int | None = None
) -> Any:
    """Two steps, on clocks that go on by a millisecond at each look."""
    model = parity.build(parity.Chain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    looks, extra = count(), [0.0]

    def delay(*_: object) -> None:
        extra[0] += SLOW_S

    def step() -> None:
        model(torch.ones(1, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    if group.rank == slow:
        model.layers[1].register_forward_hook(delay)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: next(looks) / 1000 + extra[0])
        with zero_engine.timeline(model) as recorded:
            assert recorded.ranks == ()
            with pytest.raises(StateError, match=r"Timeline\.summary\(\): nothing is recorded yet"):
                recorded.summary()
            step()
            step()
    return recorded


@pytest.mark.parametrize("stage", [1, 3])
def test_every_moment_of_every_rank_is_one_thing(
    group: Group, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """What overlaps or is missing would make sums that no time has."""
    recorded = _record(group, monkeypatch, stage=stage)

    assert len(recorded.ranks) == group.world_size
    for events in recorded.ranks:
        assert all(before.stop_s == after.start_s for before, after in pairwise(events))
        assert all(event.seconds > 0 for event in events)
        kinds = Counter((event.kind, event.subject) for event in events)
        for index in range(4):
            assert kinds["reduce", f"layers.{index}"] == 2
            assert (kinds["gather", f"layers.{index}"] >= 2) == (stage == 3)
        assert {"compute", "step"} < {kind for kind, _ in kinds}


@pytest.mark.ranks(2, 3)
@pytest.mark.skipif("config.getoption('device') == 'sim'", reason="its kernels take no time")
def test_the_rank_that_the_others_wait_for_is_named(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question with which people open a profiler."""
    slow = group.world_size - 1
    recorded = _record(group, monkeypatch, stage=3, slow=slow)

    summary = recorded.summary()
    assert f"rank {slow} was busy longest: {2 * SLOW_S * 1e3:.0f}"[:-3] in summary
    lines = [line.split() for line in summary.splitlines()]
    (compute,) = (float(line[-2]) for line in lines if line[:2] == ["-", "compute"])
    assert compute > 2 * SLOW_S * 1e3 / group.world_size  # the mean of a rank
    (reduce,) = (line for line in lines if line[:2] == ["layers.3", "reduce"])
    assert float(reduce[-1]) > 0  # was in flight while others were computed


def test_a_saved_trace_has_all_of_it(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the form that Perfetto reads: microseconds, a process for each rank."""
    recorded = _record(group, monkeypatch, stage=3)
    path = tmp_path / f"{group.rank}.json"
    recorded.save(path)

    rows = json.loads(path.read_text())["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["ph"] == "M"]
    assert names == [f"rank {rank}" for rank in range(group.world_size)]
    for rank, events in enumerate(recorded.ranks):
        mine = [row for row in rows if row["ph"] == "X" and row["pid"] == rank and not row["tid"]]
        assert [(row["cat"], row["ts"], row["dur"]) for row in mine] == [
            (event.kind, event.start_s * 1e6, event.seconds * 1e6) for event in events
        ]
        flights = [row for row in rows if row["ph"] == "X" and row["pid"] == rank and row["tid"]]
        assert {row["name"] for row in flights} >= {f"reduce layers.{i}" for i in range(1, 4)}
    with pytest.raises(FileError, match="cannot be written"):
        recorded.save(tmp_path / "none" / "run.json")


@pytest.mark.ranks(1)
def test_a_picture_is_drawn_or_the_error_says_why_not(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Matplotlib is an extra."""
    recorded = _record(group, monkeypatch, stage=2)
    recorded.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="use an ending such as"):
        recorded.plot(tmp_path / "run.hat")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        recorded.plot(tmp_path / "run.png")


def test_an_exception_inside_ends_the_recording_and_stays_itself(group: Group) -> None:
    """No rank waits for the others' events then."""
    model = parity.build(parity.Chain)
    zero_engine.shard(model, parity.adamw(model), ZeroConfig(2), group=group)
    with pytest.raises(ZeroDivisionError), zero_engine.timeline(model) as recorded:
        raise ZeroDivisionError
    assert recorded.ranks == ()
    with pytest.raises(StateError), zero_engine.timeline(nn.Linear(1, 1)):
        pass
