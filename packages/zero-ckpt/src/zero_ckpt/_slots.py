"""Permanent memory for the inputs of layers that are alike, which calls take turns to use."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from attrs import define, field
from torch import Tensor

from ._errors import CheckpointError
from ._host import AbstractHost


class _Key(NamedTuple):
    """Inputs at the same place of layers on the same device are alike."""

    position: int
    device: torch.device


@define(eq=False)
class _Slab:
    memory: Tensor  # (slots, elements of one)
    free: list[int]  # slots that nobody uses
    users: dict[int, Any] = field(factory=dict, init=False)  # streams that used them last


@define(eq=False)
class Slot:
    """Memory for one input of one call. Given back when this object dies."""

    tensor: Tensor
    _slab: _Slab
    _index: int

    def __del__(self) -> None:
        self._slab.free.append(self._index)


@final
@define(eq=False)
class Slots:
    """As many of each kind as there are layers; allocated when the first one comes."""

    _num_slots: int
    _slabs: dict[_Key, _Slab] = field(factory=dict, init=False)

    def take(self, position: int, like: Tensor, layer: str, host: AbstractHost | None) -> Slot:
        """A slot for a 1-D tensor, not yet written. Local.

        Args:
            position: Of the input among those of its call.
            like: Of the same numel and dtype, and of the same device if there is no host.
            layer: Whose input, for errors.
            host: Whose memory it is to be; the tensor's device's when None.

        Raises:
            CheckpointError: All slots are taken, or those of this position are of another kind.
        """
        key = _Key(position, like.device)
        if key not in self._slabs:
            shape = (self._num_slots, like.numel())
            memory = like.new_empty(shape) if host is None else host.allocate(shape, like.dtype)
            self._slabs[key] = _Slab(memory, list(reversed(range(self._num_slots))))
        slab = self._slabs[key]
        _, numel = slab.memory.shape
        if (numel, slab.memory.dtype) != (like.numel(), like.dtype):
            raise CheckpointError(
                f"{layer}: expected {numel} elements of {slab.memory.dtype} to keep of its input "
                f"{position}, as in the first layer, for which contiguous memory was allocated; "
                f"got {like.numel()} of {like.dtype}. Call reset() when shapes change, or leave "
                "out num_slots where layers are not alike"
            )
        if not slab.free:
            raise CheckpointError(
                f"{layer}: expected {self._num_slots} layers at most, as was announced, and the "
                "inputs of so many are kept now. Announce more (num_slots, num_checkpoints, "
                "set_num_layers()), run what has no backward under no_grad(), or let go of outputs "
                "whose backward will not come, and reset()"
            )
        index = slab.free.pop()
        if slab.memory.device.type != "cpu":
            stream = torch.accelerator.current_stream(slab.memory.device)
            if slab.users.get(index, stream) != stream:
                stream.wait_stream(slab.users[index])
            slab.users[index] = stream
        # .data: a write to one slot is none to the others, as versions count
        return Slot(slab.memory.data[index], slab, index)

    def reset(self) -> None:
        """Allocate anew when the next input comes; slots in use stay what they are. Local."""
        self._slabs.clear()

    @property
    def reserved(self) -> list[Tensor]:
        """All memory, whether it is in use or not."""
        return [slab.memory for slab in self._slabs.values()]
