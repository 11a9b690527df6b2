"""Times are those of the clock, each counted where it belongs."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import asdict
from torch import Tensor, nn
from zero_ckpt import (
    AbstractKept,
    AbstractSaver,
    Checkpointer,
    CheckpointError,
    KeepSaver,
    PackedSaver,
)
from zero_ckpt.testing import clocked


class _Clock:
    """Moves when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def run(self, seconds: float) -> None:
        self.now_s += seconds


class _Slow(AbstractSaver):
    """Keeps in 2 s, restores in 8 s, of which ranks exchange for 5 s."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def save(self, inputs: Sequence[Tensor], layer: str) -> AbstractKept:
        clock, kept = self.clock, KeepSaver().save(inputs, layer)
        clock.run(2)

        class Kept(AbstractKept):
            def measures_gathers(self, measuring: Any) -> None:
                self.measuring = measuring

            def restore(self) -> Sequence[Tensor]:
                clock.run(3)
                with self.measuring():
                    clock.run(5)
                return kept.restore()

        return Kept()


class _Block(nn.Module):
    def __init__(self, clock: _Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.run(self.seconds)
        return x.sin()


def _profiling(clock: _Clock, saver: AbstractSaver | None = None) -> Checkpointer:
    return clocked(Checkpointer(profiles=True, stops_early=False, saver=saver), clock)


def _x() -> Tensor:
    return torch.ones(3, requires_grad=True)


def test_each_layer_has_the_times_of_its_own_calls() -> None:
    """Two blocks of one class are two rows, or nobody could tell which one is slow."""
    clock = _Clock()
    checkpointer = _profiling(clock, _Slow(clock))
    first, second = _Block(clock, 10), _Block(clock, 100)
    for _ in range(3):
        x = checkpointer.checkpoint(second, checkpointer.checkpoint(first, _x()))
        clock.run(1000)  # what is between calls is nobody's
        x.sum().backward()

    times = {"num_calls": 3, "num_recomputations": 3, "gather_s": 15.0, "copy_s": 15.0}
    assert [asdict(timing) for timing in checkpointer.timings()] == [
        {"layer": "_Block", "forward_s": 30.0, "recompute_s": 30.0, **times},
        {"layer": "_Block 2", "forward_s": 300.0, "recompute_s": 300.0, **times},
    ]


def test_nested_calls_count_for_both_and_a_recomputation_for_whom_it_is_made() -> None:
    """Restoring the inner one's input runs the outer one, which is not a copy of anything."""
    clock = _Clock()
    checkpointer = _profiling(clock)
    inner = _Block(clock, 10)

    def outer(x: Tensor) -> Tensor:
        clock.run(1)
        return checkpointer.checkpoint(inner, x.exp())

    checkpointer.checkpoint(outer, _x()).sum().backward()

    timings = {timing.layer.rsplit(".", 1)[-1]: timing for timing in checkpointer.timings()}
    assert (timings["outer"].forward_s, timings["_Block"].forward_s) == (11, 10)
    assert (timings["outer"].recompute_s, timings["_Block"].recompute_s) == (11, 10)
    assert all(timing.copy_s == timing.gather_s == 0 for timing in timings.values())
    assert all(timing.num_calls == 1 for timing in timings.values())


@pytest.mark.slow
def test_measurements_are_added_up_before_they_are_many() -> None:
    """A run of a million steps must not keep a record of each."""
    clock = _Clock()
    checkpointer = _profiling(clock)
    block, num_calls = _Block(clock, 1), 3000
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(num_calls):
        checkpointer.checkpoint(block, _x())

    assert len(gc.get_objects()) - before < num_calls
    (timing,) = checkpointer.timings()
    assert timing.forward_s == timing.num_calls == num_calls


def test_a_call_that_raises_is_measured_and_ends() -> None:
    """Otherwise later calls would be counted inside of it."""
    clock = _Clock()
    checkpointer = _profiling(clock)

    def failing(x: Tensor) -> Tensor:
        clock.run(4)
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            checkpointer.checkpoint(failing, _x())

    assert [timing.forward_s for timing in checkpointer.timings()] == [8]


def test_the_table_has_a_line_for_each_layer() -> None:
    """It is what one looks at."""
    pytest.importorskip("tabulate")
    clock = _Clock()
    checkpointer = _profiling(clock)
    block = _Block(clock, 1.5)
    checkpointer.name_layer(block, "encoder.0")
    checkpointer.checkpoint(block, _x()).sum().backward()

    header, _, row = checkpointer.profile_table().splitlines()
    assert re.split(r"\s{2,}", header.strip()) == [
        *("layer", "calls", "again"),
        *("forward s", "recompute s", "gather s", "copy s"),
    ]
    seconds = ["1.500000", "1.500000", "0.000000", "0.000000"]
    assert row.split() == ["encoder.0", "1", "1", *seconds]


def test_without_an_optional_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself needs only torch and attrs."""
    monkeypatch.setitem(sys.modules, "tabulate", None)
    monkeypatch.setitem(sys.modules, "zero_comm", None)
    mpu = SimpleNamespace(
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 2,
        get_model_parallel_group=lambda: None,
    )

    with pytest.raises(CheckpointError, match="pip install tabulate"):
        Checkpointer(profiles=True).profile_table()
    for split in (
        lambda: PackedSaver(group=mpu),
        lambda: Checkpointer().configure(mpu, partition_activations=True),
    ):
        with pytest.raises(CheckpointError, match=r"pip install \./packages/zero-comm '\./pack"):
            split()
    PackedSaver()
    Checkpointer().configure(mpu, checkpoint_in_cpu=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device_time_is_the_streams_and_nobody_waits() -> None:
    """A host's clock would measure how long launching takes."""
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    checkpointer = Checkpointer(profiles=True)

    def products(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ x).tanh()
        return x

    torch.cuda.set_sync_debug_mode("error")
    try:
        y = checkpointer.checkpoint(products, x).sum()
        y.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    (timing,) = checkpointer.timings()
    assert timing.forward_s > 0.0005 and timing.recompute_s > 0.0005


# ---- Whose call it is ----


class _Scaling(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    def inverse(self, x: Tensor) -> Tensor:
        return 1 / x


def _closure(scale: float) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor) -> Tensor:
        return x * scale

    return scaled


def test_a_block_is_one_layer_in_whatever_form_it_is_called() -> None:
    """Libraries bind keyword arguments anew for every call; a closure has nothing but its name."""
    block, checkpointer = _Scaling(), Checkpointer(profiles=True)
    forms = [
        block,
        block.forward,
        partial(block, scale=2.0),
        partial(block.__call__, scale=2.0),
        partial(_Scaling.forward, block, scale=2.0),
        partial(nn.Module.__call__, block, scale=2.0),
    ]
    for function in (*forms, block.inverse, _closure(1.0), abs, _closure(2.0)):
        checkpointer.checkpoint(function, _x())

    assert [(timing.layer, timing.num_calls) for timing in checkpointer.timings()] == [
        ("_Scaling", len(forms)),
        ("_Scaling.inverse", 1),
        ("_closure.<locals>.scaled", 2),
        ("abs", 1),
    ]


def test_a_module_that_is_gone_is_forgotten() -> None:
    """A name must keep no model alive, nor a new module at its address get its name."""
    checkpointer = Checkpointer(profiles=True)
    for _ in range(3):
        block = _Scaling()
        checkpointer.checkpoint(block, _x())
        seen = weakref.ref(block)
        del block

        assert seen() is None

    names = [timing.layer for timing in checkpointer.timings()]
    assert names == ["_Scaling", "_Scaling 2", "_Scaling 3"]
