"""The state of random number generators: captured, and drawn from again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from ._tracker import Lent, RngTracker


@frozen
class RngSnapshot:
    """Of the CPU's generator, those of devices, and every rng of a tracker; each a uint8 tensor."""

    cpu: Tensor
    devices: Mapping[torch.device, Tensor]
    tracked: Mapping[str, Tensor]
    lent: Lent | None  # which of them stood in for the default one, if one did

    @classmethod
    def take(cls, devices: Iterable[torch.device], tracker: RngTracker) -> RngSnapshot:
        """As they are now. Local; waits for no device."""
        states = {device: get_state(device) for device in devices if device.type != "cpu"}
        return cls(torch.get_rng_state(), states, *tracker.capture())

    @contextmanager
    def drawn_again(self, tracker: RngTracker) -> Iterator[None]:
        """Inside, random numbers are those that came after `take`; afterwards nothing has moved."""
        before = RngSnapshot.take(self.devices, tracker)
        try:
            self.put_back(tracker)
            with tracker.restored():
                yield
        finally:
            before.put_back(tracker)

    def put_back(self, tracker: RngTracker) -> None:
        """Set all of them to what they were. Local."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            set_state(device, state)
        tracker.restore(self.tracked, self.lent)


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
