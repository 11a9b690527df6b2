"""Default generators of devices: where they are, and where random numbers may be drawn."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def get_state(device: torch.device) -> Tensor:
    """The state of a device's default generator: uint8, on the CPU."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_state(device: torch.device, state: Tensor) -> None:
    """Put back what `get_state` gave."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def seeded_state(device: torch.device, seed: int) -> Tensor:
    """The state that `manual_seed` would put the device's default generator in. Local."""
    return torch.Generator(device).manual_seed(seed).get_state()


def devices_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """Where random numbers may be drawn: the devices of tensors, and the current accelerator."""
    found = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
        found.add(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    return tuple(sorted(found, key=str))
