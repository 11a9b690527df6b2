"""Inputs that leave the device and come back: what only a GPU can show."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_ckpt import Checkpointer, PackedSaver
from zero_comm.testing import equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEPTH = 8
OPTIONS: list[dict[str, Any]] = [
    {"on_host": True},
    {"num_slots": DEPTH},
    {"on_host": True, "num_slots": DEPTH},
]


def _layers(dim: int) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Dropout(0.2)) for _ in range(DEPTH)]
    return nn.ModuleList(layers).cuda()


def _step(layers: nn.ModuleList, x: Tensor, run: Any) -> Tensor:
    for layer in layers:
        x = run(layer, x)
    return x


def _train(run: Any, dim: int, steps: int = 6) -> list[Tensor]:
    layers = _layers(dim)
    numbers = []
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, dim, device="cuda", requires_grad=True)
        output = _step(layers, x, run)
        output.square().sum().backward()
        assert x.grad is not None
        numbers += [output.detach().clone(), x.grad, torch.cuda.get_rng_state()]
        del output
        junk = [torch.full_like(x, torch.nan) for _ in range(3)]  # to be seen where memory is free
        del junk
    return numbers + [p.grad for p in layers.parameters() if p.grad is not None]


@pytest.mark.parametrize("dim", [16, 4096], ids=["copies lag", "computation lags"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_numbers_are_those_without(options: dict[str, Any], dim: int) -> None:
    """A copy that is read too early, or whose memory went too early, is a silent error."""
    expected = _train(lambda function, *args: function(*args), dim)

    found = _train(Checkpointer(saver=PackedSaver(**options)).checkpoint, dim)

    assert all(map(equal, found, expected))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2]], ids=str)
def test_the_device_keeps_one_input_of_all(options: dict[str, Any]) -> None:
    """Of the others it is what the option is for that they are gone."""
    saver = PackedSaver(**options)
    run, layers = Checkpointer(saver=saver).checkpoint, _layers(1024)
    with torch.no_grad():
        _step(layers, torch.randn(1024, 1024, device="cuda"), run)  # workspaces are there by now
    before = torch.cuda.memory_allocated()
    output = _step(layers, torch.randn(1024, 1024, device="cuda", requires_grad=True), run)
    kept, input_bytes = saver.kept_bytes(), output.nbytes

    assert kept[torch.device("cpu")] == DEPTH * input_bytes
    assert kept[torch.device("cuda", 0)] == input_bytes  # the last one's copy is under way
    # The output, the last input, and the leaf, which its gradient is to be given to.
    assert torch.cuda.memory_allocated() - before <= 3 * input_bytes + 2**20
    output.sum().backward()
    del output
    assert saver.kept_bytes() == {}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_steady_step_never_waits_for_the_device(options: dict[str, Any]) -> None:
    """A host that waits launches nothing meanwhile."""
    run = Checkpointer(saver=PackedSaver(**options)).checkpoint
    layers = _layers(256)
    x = torch.randn(64, 256, device="cuda")
    for _ in range(3):
        _step(layers, x, run).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(layers, x, run).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_copies_are_hidden_behind_computation() -> None:
    """Where a layer takes longer than the copy of its input, moving it costs next to nothing."""

    def timed(run: Any) -> float:
        layers = _layers(8192)
        x = torch.randn(4096, 8192, device="cuda")
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            _step(layers, x, run).sum().backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    assert timed(Checkpointer(saver=PackedSaver(on_host=True)).checkpoint) < 1.2 * timed(
        Checkpointer().checkpoint
    )
