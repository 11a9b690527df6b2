"""deepspeed.accelerator: which device this process works on."""

from __future__ import annotations

from typing import Final, final

import torch


@final
class Accelerator:
    """torch's accelerator, or the CPU where there is none."""

    def is_available(self) -> bool:
        """Whether there is more than a CPU."""
        return torch.accelerator.is_available()

    def device_name(self, device_index: int | None = None) -> str:
        """What `tensor.to` takes: "cuda:0", "cuda" without an index, or "cpu"."""
        kind = torch.accelerator.current_accelerator()
        if kind is None:
            return "cpu"
        return kind.type if device_index is None else f"{kind.type}:{device_index}"

    def device_count(self) -> int:
        """How many devices this process sees; the CPU counts as one."""
        return torch.accelerator.device_count() or 1

    def set_device(self, device_index: int) -> None:
        """Work on this one from now on."""
        if self.is_available():
            torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int:
        """The index of the device that this process works on."""
        return torch.accelerator.current_device_index() if self.is_available() else 0

    def current_device_name(self) -> str:
        """The same as a name."""
        return self.device_name(self.current_device())

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self.is_available():
            index = self.current_device() if device_index is None else device_index
            torch.accelerator.synchronize(index)

    def communication_backend_name(self) -> str:
        """What torch.distributed needs for it."""
        return "nccl" if self.device_name() == "cuda" else "gloo"


_ACCELERATOR: Final = Accelerator()


def get_accelerator() -> Accelerator:
    """The one that there is."""
    return _ACCELERATOR
