"""FusedAdam: what can be said of it without a GPU, and its numbers with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zero_offload import FusedAdam, NativeUnavailableError, OffloadError
from zero_offload.build import CompileError, compile_cuda
from zero_offload.testing import fused_pieces

CSRC = Path(__file__).parents[1] / "csrc"

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
def test_the_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    """Wheels are made on machines that have none."""
    try:
        library = compile_cuda(CSRC, tmp_path)
    except CompileError as error:
        if "no nvcc" in str(error):
            pytest.skip(str(error))
        raise

    assert library.stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == [library.name]


@pytest.mark.parametrize("numel", [0, 1, 10, 11, 25])
def test_pieces_cover_each_element_once(numel: int) -> None:
    """A block that takes an element twice would decay it twice."""
    tensors = [torch.zeros(numel) for _ in range(4)]
    out, step = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(())

    pieces = fused_pieces(tensors, out=out, step=step, piece_numel=10)

    assert [piece.numel for piece in pieces] == [10] * (numel // 10) + [numel % 10] * (
        numel % 10 > 0
    )
    start = 0
    for piece in pieces:
        places = [piece.param, piece.grad, piece.first, piece.second]
        assert places == [tensor.data_ptr() + 4 * start for tensor in tensors]
        assert (piece.largest, piece.out) == (0, out.data_ptr() + 2 * start)
        assert piece.step == step.data_ptr()
        start += piece.numel


def test_parameters_elsewhere_are_refused() -> None:
    """Their addresses mean nothing on a device; without the library, that is said first."""
    with pytest.raises(
        (OffloadError, NativeUnavailableError), match=r"CPUAdam|zero_offload\.build"
    ):
        FusedAdam([nn.Parameter(torch.zeros(3))])


# ---- On a GPU ----


def _params(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    sizes = [0, 1, 7, 1 << 16, (1 << 16) + 3, 1000]
    flat = torch.randn(sum(sizes) + 1, device="cuda").to(dtype)[1:]  # unaligned, most of them
    return [
        nn.Parameter(part.clone() if i % 2 else part) for i, part in enumerate(flat.split(sizes))
    ]


def _draw(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator("cuda").manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, device="cuda")
        param.grad = grad.to(param.dtype)


def _step_both(step: int, *pairs: tuple[list[nn.Parameter], torch.optim.Optimizer]) -> None:
    for params, optimizer in pairs:
        _draw(params, step)
        optimizer.step()


def _assert_close(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
def test_it_follows_torchs_fused_optimizers(decoupled: bool, amsgrad: bool) -> None:
    """Users exchange one for the other in the middle of a run; scalers leave work to the kernel."""
    ours, theirs = _params(torch.float32), _params(torch.float32)
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": amsgrad}
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    one = FusedAdam(ours, decoupled=decoupled, **options)
    other = kind(theirs, fused=True, **options)
    for step in range(40):
        _step_both(step, (ours, one), (theirs, other))
    _assert_close(ours, theirs)

    for step, found in enumerate((0.0, 1.0, 0.0), 40):
        for optimizer in (one, other):
            optimizer.grad_scale = torch.tensor(4.0, device="cuda")  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(found, device="cuda")  # type: ignore[attr-defined]
        _step_both(step, (ours, one), (theirs, other))
    _assert_close(ours, theirs)
    assert one.state[ours[1]]["step"].item() == 42

    for optimizer in (one, other):
        del optimizer.grad_scale, optimizer.found_inf
    other.load_state_dict(one.state_dict())
    _step_both(50, (ours, one), (theirs, other))
    _assert_close(ours, theirs)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_rounded_into_parameters(dtype: torch.dtype) -> None:
    """Steps smaller than a rounding of the parameter must add up."""
    ours = _params(dtype)
    masters = [nn.Parameter(param.detach().float()) for param in ours]
    one, other = FusedAdam(ours, lr=1e-4), torch.optim.AdamW(masters, lr=1e-4, fused=True)
    for step in range(20):
        _draw(ours, step)
        for param, master in zip(ours, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        one.step()
        other.step()
    for param, master in zip(ours, masters, strict=True):
        torch.testing.assert_close(one.state[param]["master"], master, rtol=1e-5, atol=1e-6)
        assert torch.equal(param, one.state[param]["master"].to(dtype))


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_goes_on_being_right_and_a_steady_one_waits_for_nothing() -> None:
    """Graphs replay addresses and constants: what changes must be read on the device."""
    ours, theirs = _params(torch.float32), _params(torch.float32)
    rate = torch.tensor(1e-2, device="cuda")
    one, other = FusedAdam(ours, lr=rate), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    _step_both(0, (ours, one), (theirs, other))
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    other.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.step()
    for turn in range(4):
        if turn == 3:
            rate.fill_(1e-3)
            other.param_groups[0]["lr"] = 1e-3
        graph.replay()
        other.step()
    _assert_close(ours, theirs)
