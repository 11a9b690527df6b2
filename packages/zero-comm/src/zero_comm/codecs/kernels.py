"""Kernels that encode blocks on a device in one pass: chosen once, or why plain torch does it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from zero_comm import _native
from zero_comm._native._compile import LIBRARY, why_stale
from zero_comm.errors import CodecError
from zero_comm.torch_private import accelerator

from .codec import decode_blocks, encode_blocks

if TYPE_CHECKING:
    from zero_comm._native import CodecKernels

    from .triton import TritonKernels

SWITCH: Final = "ZERO_COMM_TRITON"
_CAPABILITY: Final = (8, 0)  # bfloat16 in hardware
_LOG: Final = logging.getLogger("zero_comm")


def native_status(device: torch.device | str = "cpu") -> str:
    """Return why blockwise codecs run in plain torch on a device; empty if kernels do. Local.

    Kernels of a CPU are compiled with the package, those of CUDA by Triton at the first call, here
    or in a codec, which takes seconds and waits for the device once.

    Raises:
        CodecError: There are none, and ZERO_COMM_NATIVE=require (of a CPU) or
            ZERO_COMM_TRITON=require (of CUDA).
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and accelerator() == device:
        device = torch.device("cuda", torch.accelerator.current_device_index())
    return _loaded(device)[1]


def kernels(device: torch.device) -> CodecKernels | TritonKernels | None:
    """Return the kernels of a device, loaded at the first call; None for plain torch.

    Raises:
        CodecError: They are required, and there are none.
    """
    return _loaded(device)[0]


@cache
def _loaded(device: torch.device) -> tuple[CodecKernels | TritonKernels | None, str]:
    if device.type == "cpu":
        found, reason = _native.load(_native.HERE / LIBRARY, os.environ)
        is_checkout = (_native.HERE.parents[2] / "hatch_build.py").exists()
        if found is not None and is_checkout and (stale := why_stale(_native.HERE, _native.HERE)):
            # The build hook has warned too, but pip hides its output.
            _LOG.warning("%s", stale)
    elif device.type == "cuda":
        found, reason = load_triton(device, os.environ)
    else:
        found, reason = None, "there are kernels for CPU and CUDA only"
    if found is None:
        message = "codecs on %s run in plain torch, several times slower, because %s"
        _LOG.warning(message, device, reason)
    return found, reason


def load_triton(
    device: torch.device, environment: Mapping[str, str]
) -> tuple[TritonKernels | None, str]:
    """Try Triton on a CUDA device as ZERO_COMM_TRITON asks: auto, require or off.

    Raises:
        CodecError: It is required and does not work, or the switch has a value it does not know.
    """
    switch = _native.switch_of(SWITCH, environment)
    if switch == "off":
        return None, f"{SWITCH}=off"
    found, reason = _try_triton(device)
    if found is None and switch == "require":
        raise CodecError(f"{SWITCH}=require, but {reason}")
    return found, reason


def _try_triton(device: torch.device) -> tuple[TritonKernels | None, str]:
    if accelerator() != torch.device("cuda"):
        return None, "there is no CUDA device"
    if torch.version.hip or torch.cuda.get_device_capability(device) < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return None, f"the kernels are for Nvidia's devices from capability 8.0 on, not for {name}"
    try:
        from zero_comm.codecs.triton import TritonKernels  # noqa: PLC0415 - a choice, not a dependency
    except ImportError as error:
        return None, f"Triton cannot be imported ({error}); `pip install triton` installs it"
    found = TritonKernels()
    try:
        is_same = _agrees(found, device)
    except Exception as error:
        # Triton has no common type of error for whatever a machine may lack.
        lines = str(error).splitlines() or [""]
        return None, f"Triton does not work on {device}: {type(error).__name__}: {lines[0]}"
    if not is_same:
        return None, f"Triton's kernels give other bits than plain torch on {device}"
    return found, ""


def _agrees(found: TritonKernels, device: torch.device) -> bool:
    """Return whether bytes and sums equal plain torch's; a fused multiply-add would differ."""
    how, numbers = {"bits": 8, "block": 256}, {"dtype": torch.float32, "device": device}
    values, results = torch.linspace(-3, 5, 4096, **numbers).sin_(), []
    for encode, decode in ((found.encode, found.decode), (encode_blocks, decode_blocks)):
        integers = torch.empty(4096, dtype=torch.uint8, device=device)
        scales = torch.empty(64, dtype=torch.uint8, device=device)
        total = torch.linspace(0, 1, 4096, **numbers)
        encode(values, integers, scales, **how)
        decode(integers, scales, total, **how, adds=True)
        results.append(torch.cat((integers, scales, total.view(torch.uint8))))
    return torch.equal(*results)
