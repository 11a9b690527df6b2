"""The optimizer's state of one parameter: made, checked and brought into shape for the kernels."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from ._errors import UnsupportedTensorError

SUPPORTED: Final = (torch.float32, torch.bfloat16, torch.float16)
MASTER: Final = "master"


@frozen(kw_only=True)
class StatePolicy:
    """Which tensors an optimizer keeps beside its parameters.

    Attributes:
        masters: Whether 16-bit parameters have an fp32 master, in their state as "master".
        state_dtype: Of moments; None for the parameter's own.
        rounding: Of bf16 parameters, to the nearest or stochastic.
        seed: Of stochastic rounding.
    """

    masters: bool = True
    state_dtype: torch.dtype | None = torch.float32
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if self.state_dtype not in (None, *SUPPORTED):
            raise ValueError(
                f"state_dtype={self.state_dtype}: expected None, {', '.join(map(str, SUPPORTED))}"
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}: expected 'nearest' or 'stochastic'")

    def has_master(self, param: Tensor) -> bool:
        """Whether the parameter is stepped in another dtype than its own."""
        return self.masters and param.dtype is not torch.float32

    def dtype_of(self, name: str, param: Tensor) -> torch.dtype:
        """Of the state's tensor `name` of `param`."""
        return torch.float32 if name == MASTER else self.state_dtype or param.dtype

    def prepare(
        self, entries: dict[str, Any], param: Tensor, names: tuple[str, ...], start: float
    ) -> None:
        """Complete `entries`, and bring what is there into dtype and memory order.

        Args:
            entries: The parameter's state, empty before its first step.
            param: On the CPU.
            names: Of its moments.
            start: What a missing first moment is filled with; the others with 0.
        """
        step = entries.get("step", 0.0)
        if not torch.is_tensor(step) or step.dtype is not torch.float32 or not step.is_cpu:
            entries["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        for name in names:
            if name not in entries:
                entries[name] = torch.full(
                    param.shape,
                    start if name == names[0] else 0.0,
                    dtype=self.dtype_of(name, param),
                    device="cpu",
                )
        if not self.has_master(param):
            entries.pop(MASTER, None)
        elif MASTER not in entries:
            entries[MASTER] = param.detach().to(torch.float32, copy=True).contiguous()
        for name, tensor in entries.items():
            if name in names or name == MASTER:
                entries[name] = self.shaped(name, tensor, param)

    def shaped(self, name: str, tensor: Tensor, param: Tensor) -> Tensor:
        """The same values as the kernels take them; the same tensor if it is so already.

        Raises:
            UnsupportedTensorError: It has not one element for each of the parameter's.
        """
        if tensor.numel() != param.numel():
            raise UnsupportedTensorError(
                f"state {name!r} has {tensor.numel()} elements, its parameter of shape "
                f"{tuple(param.shape)} has {param.numel()}"
            )
        return tensor.detach().to(device="cpu", dtype=self.dtype_of(name, param)).contiguous()


def check_param(param: Tensor, policy: StatePolicy, *, where: str) -> None:
    """Raise for a parameter that cannot be stepped here.

    Raises:
        UnsupportedTensorError: Not on the CPU, not strided, or of another dtype.
    """
    if param.device.type != "cpu":
        raise UnsupportedTensorError(
            f"{where}: expected CPU tensors, got one of shape {tuple(param.shape)} on "
            f"{param.device}. Keep a CPU copy to step, or use torch's optimizers on the device"
        )
    if param.layout is not torch.strided or param.dtype not in SUPPORTED:
        raise UnsupportedTensorError(
            f"{where}: expected dense tensors of {', '.join(map(str, SUPPORTED))}, got one of "
            f"shape {tuple(param.shape)}, {param.dtype}, {param.layout}"
        )
    if policy.rounding == "stochastic" and param.dtype is torch.float16:
        raise UnsupportedTensorError(
            f"{where}: stochastic rounding is for bfloat16, got a float16 tensor of shape "
            f"{tuple(param.shape)}"
        )
