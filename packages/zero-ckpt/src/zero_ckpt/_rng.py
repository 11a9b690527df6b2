"""The state of random number generators: captured, and drawn from again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from attrs import frozen
from torch import Tensor

from ._generators import get_state, set_state
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
