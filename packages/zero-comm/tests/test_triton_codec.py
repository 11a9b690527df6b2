"""Kernels for CUDA: equal to plain torch bit for bit, and a reason where there are none."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from zero_comm import Blockwise, CodecError, native_status
from zero_comm.codecs import decode_blocks, encode_blocks
from zero_comm.testing import forgetting_kernels, load_triton, triton_gives, triton_ptx

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- What they write and read ----


@needs_triton
def test_interpreted_kernels_write_and_read_the_same_bits() -> None:
    """Ranks with and without Triton train together, and their parameters must not differ."""
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_cases.py"))],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.stdout.split() == ["all", "agree"], ran.stderr


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_kernels_round_as_torch_does(
    capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused sum, an approximate division or a flushed denormal shows in values only seldom."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for bits in (8, 4):
        for block in (256, 10000):
            encode, decode, decode_add = triton_ptx(capability, dtype, bits, block)
            for ptx in (encode, decode, decode_add):
                assert not re.search(r"\bfma|\bmad\.\w+\.f32|ftz|approx|div\.full", ptx)
                assert not re.search(r"\b(add|sub|mul|div)(\.\w+)*(?<!\.rn)\.f32", ptx)
            assert len(re.findall(r"div\.rn\.f32", encode)) >= 2
            if dtype != "fp32":
                assert re.search(rf"cvt\.rn\.{dtype.replace('p', '')}(x2)?\.f32", decode)


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_a_gpu_writes_and_reads_the_bits_of_the_cpu() -> None:
    """Compiled for the device that is here, over more cases than the interpreter has time for."""
    import triton_cases

    for seed in range(1000):
        triton_cases.check_encode(seed, "cuda")
        triton_cases.check_decode(seed, "cuda")
    triton_cases.check_codec("cuda")


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_a_gpu_encodes_more_than_an_int_counts() -> None:
    """A flat buffer of a few units has more than 2**31 elements on a device that holds them."""
    numel = 2**31 + 777
    if torch.cuda.mem_get_info()[0] < 4 * numel:
        pytest.skip("needs 9 GB of free device memory")
    codec = Blockwise(8)
    values = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    values[-265:] = 3  # from the start of a block on
    wire = codec.encode(values)
    back = codec.decode(wire, values.fill_(0))

    assert back[-265:].eq(3).all()
    assert back[-1000:-265].eq(1).all()
    assert back[:-265:1001].eq(1).all()


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_a_gpu_uses_them_and_nothing_waits_for_it() -> None:
    """Once they are tried, a host that waits launches nothing meanwhile."""
    assert native_status("cuda") == ""
    codec, values = Blockwise(8), torch.randn(10_000, device="cuda")
    wire = codec.encode(values)
    codec.decode_add(wire, values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode(values, wire)
        codec.decode_add(wire, values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- Where there are none ----


def _plain() -> SimpleNamespace:
    return SimpleNamespace(encode=encode_blocks, decode=decode_blocks)


def _raising() -> SimpleNamespace:
    def encode(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler\nand more of it")

    return SimpleNamespace(encode=encode, decode=decode_blocks)


def _fused() -> SimpleNamespace:
    def decode(integers: Tensor, scales: Tensor, out: Tensor, **_: Any) -> None:
        steps = integers.view(torch.int8).double().view(-1, 256)
        scale = scales.view(torch.float32).double()[:, None]
        out.copy_(out.double() + (steps * scale).view(-1))

    return SimpleNamespace(encode=encode_blocks, decode=decode)


@pytest.fixture
def with_a_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU that says it is an H100."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
    return torch.device("cpu")


def test_they_are_tried_before_they_are_used(with_a_device: torch.device) -> None:
    """What compiles elsewhere may not here, and other bits on one rank make another model."""
    for kernels, said in (
        (_plain, ""),
        (_raising, "does not work on cpu: RuntimeError: Failed to find C compiler"),
        (_fused, "Triton's kernels give other bits than plain torch on cpu"),
    ):
        with triton_gives(kernels):
            found, reason = load_triton(with_a_device, {})
        assert (found is None) == bool(said)
        assert reason.endswith(said)


def test_there_is_a_reason_where_there_are_none(
    with_a_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow run whose cause nobody can ask for is hard to mend."""
    with triton_gives(None):
        assert "Triton cannot be imported (" in _why_not(with_a_device)
        assert "`pip install triton` installs it" in _why_not(with_a_device)
        with pytest.raises(CodecError, match="=require, but Triton cannot be imported"):
            load_triton(with_a_device, {"ZERO_COMM_TRITON": "require"})

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "from capability 8.0 on, not for a device" in _why_not(with_a_device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert _why_not(with_a_device) == "there is no CUDA device"

    assert _why_not(with_a_device, ZERO_COMM_TRITON="off") == "ZERO_COMM_TRITON=off"
    with pytest.raises(CodecError, match="ZERO_COMM_TRITON='maybe': expected one of auto, require"):
        _why_not(with_a_device, ZERO_COMM_TRITON="maybe")


def _why_not(device: torch.device, **environment: str) -> str:
    found, reason = load_triton(device, environment)
    assert found is None
    return reason


def test_a_status_is_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled codecs of a CPU say nothing about those of a GPU."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with forgetting_kernels():
        assert native_status("cuda") == "there is no CUDA device"
        assert native_status("meta") == "there are kernels for CPU and CUDA only"
        monkeypatch.setenv("ZERO_COMM_TRITON", "off")
        assert native_status() == native_status("cpu")
        assert "ZERO_COMM_TRITON" not in native_status()
