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
        """Return whether there is an accelerator besides the CPU."""
        return accelerator() is not None

    def device_name(self, device_index: int | None = None) -> str:
        """Return a name for `tensor.to`: "cuda:0", "cuda" without an index, or "cpu"."""
        kind = accelerator()
        if kind is None:
            return "cpu"
        return kind.type if device_index is None else f"{kind.type}:{device_index}"

    def device_count(self) -> int:
        """Return how many devices this process sees; 1 where there is only a CPU."""
        return torch.accelerator.device_count() if self.is_available() else 1

    def set_device(self, device_index: int) -> None:
        """Make this device the current one, on which the process works from now on."""
        if self.is_available():
            torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int:
        """The index of the device that this process works on."""
        return torch.accelerator.current_device_index() if self.is_available() else 0

    def current_device_name(self) -> str:
        """Return the name of the current device, such as "cuda:0" or "cpu"."""
        return self.device_name(self.current_device())

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self.is_available():
            index = self.current_device() if device_index is None else device_index
            torch.accelerator.synchronize(index)

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16; every CPU does."""
        return self.device_name() != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16; every CPU does, and GPUs from compute 7.0."""
        return self.device_name() != "cuda" or torch.cuda.get_device_capability() >= (7, 0)

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that a model can be trained in on this device."""
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
        """Return the torch.distributed backend for this type of device, such as "nccl"."""
        return dist.Backend.default_device_backend_map.get(self.device_name(), "gloo")


_ACCELERATOR: Final = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the only `Accelerator` of this process."""
    return _ACCELERATOR
