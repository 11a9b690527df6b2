"""Every random number generator of a rank, as tensors of bytes by the name of its stream."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
import zero_ckpt
from torch import Tensor

from ._errors import FileError
from ._plain_values import from_json, to_json

_CPU: Final = "torch.cpu"
_DEVICE: Final = "torch.device"
_PYTHON: Final = "python"
_NUMPY: Final = "numpy"
_TRACKER: Final = "zero_ckpt"


def capture_rngs(device: torch.device) -> dict[str, Tensor]:
    """Where they are: torch's of the CPU and of `device`, Python's, numpy's, zero_ckpt's. Local."""
    streams = {_CPU: torch.get_rng_state(), _PYTHON: _said(random.getstate())}
    if device.type != "cpu":
        streams[_DEVICE] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        streams[_NUMPY] = _said((kind, torch.from_numpy(keys.astype("int64")), *rest))
    tracker = zero_ckpt.get_cuda_rng_tracker()
    if tracker.is_initialized():
        streams[_TRACKER] = _said(tracker.state_dict())
    return {name: state.cpu() for name, state in streams.items()}


def restore_rngs(streams: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on where `capture_rngs` was called; what was not there then, or is not now, is left.

    Raises:
        FileError: A state is not one of its generator.
    """
    for name, restore in _RESTORERS.items():
        if name not in streams or (name == _DEVICE and device.type == "cpu"):
            continue
        try:
            restore(streams[name], device)
        except (ValueError, TypeError, RuntimeError, KeyError, LookupError) as error:
            raise FileError(f"state of random numbers {name!r} cannot be read: {error}") from error


def _restore_cpu(state: Tensor, device: torch.device) -> None:
    torch.set_rng_state(state)


def _restore_device(state: Tensor, device: torch.device) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


def _restore_python(state: Tensor, device: torch.device) -> None:
    random.setstate(_value_of(state))


def _restore_numpy(state: Tensor, device: torch.device) -> None:
    if "numpy" in sys.modules:
        kind, keys, *rest = _value_of(state)
        sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def _restore_tracker(state: Tensor, device: torch.device) -> None:
    zero_ckpt.get_cuda_rng_tracker().load_state_dict(_value_of(state))


_RESTORERS: Final = {
    _CPU: _restore_cpu,
    _DEVICE: _restore_device,
    _PYTHON: _restore_python,
    _NUMPY: _restore_numpy,
    _TRACKER: _restore_tracker,
}


def _said(value: Any) -> Tensor:
    content = json.dumps(to_json(value, "state of random numbers")).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _value_of(state: Tensor) -> Any:
    return from_json(json.loads(state.numpy().tobytes()))
