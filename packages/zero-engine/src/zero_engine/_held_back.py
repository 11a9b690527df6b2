"""Memory of an update that goes on while the model computes: its new values, and its gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_offload import HostArena


@final
@define(eq=False)
class HeldBack:
    """For each target a parameter that is stepped in its place, and room for its gradient.

    Both lie where the target does; values are of its dtype, and gradients of the master's.

    Args:
        arena: Whose memory, where that is the host's.
        grads_leave: Gradients lie on the host in any case.
    """

    arena: HostArena
    grads_leave: bool = field(kw_only=True)
    stepped: dict[nn.Parameter, nn.Parameter] = field(factory=dict, init=False)  # by target
    _grads: dict[nn.Parameter, Tensor] = field(factory=dict, init=False)

    def take(self, targets: Collection[nn.Parameter]) -> None:
        """Take the room for these.

        Raises:
            BudgetError: The host does not have it.
        """
        for target, value in self._allocate(targets, widens=False).items():
            self.stepped[target] = nn.Parameter(value)
        self._grads = self._allocate(targets, widens=True)

    def take_gradients(self, grads: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Copy them; by what is stepped."""
        for target, grad in grads.items():
            self._grads[target].copy_(grad)
        return {self.stepped[target]: self._grads[target] for target in grads}

    @property
    def cuda(self) -> torch.device | None:
        """Where targets lie on the device, and that is CUDA's."""
        return next((target.device for target in self.stepped if target.is_cuda), None)

    @property
    def host_bytes(self) -> int:
        """Of host memory."""
        return sum(tensor.nbytes for tensor in self._tensors() if tensor.is_cpu)

    @property
    def device_bytes(self) -> int:
        """Of memory of another device."""
        return sum(tensor.nbytes for tensor in self._tensors() if not tensor.is_cpu)

    def release(self) -> None:
        """Forget all of it."""
        self.stepped, self._grads = {}, {}

    def _tensors(self) -> list[Tensor]:
        return [*self.stepped.values(), *self._grads.values()]

    def _allocate(
        self, targets: Collection[nn.Parameter], *, widens: bool
    ) -> dict[nn.Parameter, Tensor]:
        """A tensor for each, of its shape; those of one dtype and device are one memory."""
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for target in targets:
            place = place_of(target, widens=widens, grads_leave=self.grads_leave)
            alike.setdefault(place, []).append(target)
        found = {}
        for (dtype, device), some in alike.items():
            numels = [target.numel() for target in some]
            if device.type == "cpu":
                memory = self.arena.allocate(sum(numels), dtype=dtype)
            else:
                memory = torch.zeros(sum(numels), dtype=dtype, device=device)
            for target, part in zip(some, memory.split(numels), strict=True):
                found[target] = part.view(target.shape)
        return found


def place_of(
    target: nn.Parameter, *, widens: bool, grads_leave: bool
) -> tuple[torch.dtype, torch.device]:
    """Of what is held back of a target, or with `widens` of its gradient: dtype, and where."""
    dtype = torch.promote_types(target.dtype, torch.float32) if widens else target.dtype
    on_host = widens and grads_leave
    return dtype, torch.device("cpu") if on_host else target.device


def held_back_bytes(targets: Collection[nn.Parameter], *, grads_leave: bool) -> tuple[int, int]:
    """On the device and on the host, as `HeldBack` would take them. Arithmetic only."""
    on_device = on_host = 0
    for target in targets:
        for widens in (False, True):
            dtype, device = place_of(target, widens=widens, grads_leave=grads_leave)
            num_bytes = target.numel() * dtype.itemsize
            on_host += num_bytes if device.type == "cpu" else 0
            on_device += num_bytes if device.type != "cpu" else 0
    return on_device, on_host
