"""deepspeed.accelerator: which device this process works on."""

from __future__ import annotations

from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from zero_engine.torch_private import accelerator


@final
class Accelerator:
    """torch's accelerator, or the CPU where there is none."""

    def is_available(self) -> bool:
        """Whether there is more than a CPU."""
        return accelerator() is not None

    def device_name(self, device_index: int | None = None) -> str:
        """What `tensor.to` takes: "cuda:0", "cuda" without an index, or "cpu"."""
        kind = accelerator()
        if kind is None:
            return "cpu"
        return kind.type if device_index is None else f"{kind.type}:{device_index}"

    def device_count(self) -> int:
        """How many devices this process sees; the CPU counts as one."""
        return torch.accelerator.device_count() if self.is_available() else 1

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

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16; every CPU does."""
        return self.device_name() != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16; every CPU does, and GPUs from compute 7.0 on."""
        return self.device_name() != "cuda" or torch.cuda.get_device_capability() >= (7, 0)

    def supported_dtypes(self) -> list[torch.dtype]:
        """What a model may be trained in."""
        half = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def pin_memory(
        self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> Tensor:
        """A page-locked copy of a host tensor; the tensor itself where there is only a CPU.

        Args:
            tensor: On the host.
            make_copy: False: its dtype and shape count, and the values are undefined.
            match_shape: False, with `make_copy=False`: 1-D, of the same numel.
        """
        if not self.is_available():
            return tensor
        if make_copy:
            return tensor.pin_memory()
        shape = tensor.shape if match_shape else (tensor.numel(),)
        return torch.empty(shape, dtype=tensor.dtype, pin_memory=True, device="cpu")

    def communication_backend_name(self) -> str:
        """What torch.distributed needs for it."""
        return dist.Backend.default_device_backend_map.get(self.device_name(), "gloo")


_ACCELERATOR: Final = Accelerator()


def get_accelerator() -> Accelerator:
    """The one that there is."""
    return _ACCELERATOR
