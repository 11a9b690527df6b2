"""This rank's part of one buffer's reduced gradients, on the device or at a home."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from ._early_norms import EarlyNorms
from ._flat_buffer import FlatBuffer
from ._gradient_home import AbstractGradientHome
from ._guards import GradientShard

# NOTE(shards): the memory of a reduced gradient is kept when the gradient is dropped. Giving it
# back and faulting its pages in again cost 5% of a step on the CPU; release_buffers() gives it
# back.


@define(eq=False)
class ReducedShard:
    """Memory for it, and what `shard_params` have of it as their gradients."""

    buffer: FlatBuffer
    home: AbstractGradientHome | None = None  # where it rests; on the device when None
    memory: Tensor | None = field(default=None, init=False)  # 1-D; see NOTE(shards)
    parts: tuple[Tensor, ...] = field(default=(), init=False)  # of it, by position
    norms: EarlyNorms = field(factory=EarlyNorms, init=False)  # of what has left the device

    def ensure(self) -> Tensor:
        """The memory, made at first use."""
        if self.memory is None:
            buffer = self.buffer
            numel, dtype = buffer.shard_numel, buffer.training.dtype
            if self.home is not None:
                self.memory = self.home.allocate(numel, dtype)
            else:
                self.memory = torch.zeros(numel, dtype=dtype, device=buffer.group.device)
            parts = buffer.parts_of(self.memory)
            self.parts = tuple(GradientShard.over(part, buffer.group) for part in parts)
        return self.memory

    def release(self) -> None:
        """Give the memory back."""
        self.memory, self.parts = None, ()

    def room(self, *, has_gradient: bool) -> Tensor:
        """Where a reduction may end, in the dtype that travels: here, or in memory of its own."""
        memory, dtype = self.ensure(), self.buffer.wire_dtype
        if has_gradient or self.home is not None or dtype != memory.dtype:
            return torch.empty(memory.numel(), dtype=dtype, device=self.buffer.group.device)
        return memory

    def put(self, position: int, value: Tensor) -> None:
        """Replace a part by that of a whole gradient. Local."""
        self.ensure()
        piece = self.buffer.piece_of(position)
        if piece is not None:
            part = self.parts[position]
            part.copy_(value.reshape(-1)[piece.in_tensor.as_slice()].view(part.shape))

    def take(self, received: Tensor) -> None:
        """Add what a reduction gave to what the optimizer has; the first becomes that itself."""
        if received is self.memory:
            return
        shard, params = self.ensure(), self.buffer.shard_params
        self.norms.clear()
        has_first = [param.grad is None for param in params]
        for param, part in zip(params, self.parts, strict=True):
            if param.grad is not None and param.grad.data_ptr() != part.data_ptr():
                part.copy_(param.grad)  # the user put another there
        if self.home is not None and len(set(has_first)) == 1:
            if has_first[0] and received.dtype == shard.dtype:
                self.norms.take(self.buffer.parts_of(received))
            self.home.deliver(received, shard, adds=not has_first[0])
            return
        more = self.buffer.parts_of(received)
        for is_first, part, other in zip(has_first, self.parts, more, strict=True):
            if self.home is not None:
                self.home.deliver(
                    other.view(-1), part.as_subclass(Tensor).view(-1), adds=not is_first
                )
            elif is_first:
                part.copy_(other)
            else:
                part.add_(other)

    def norm_of(self, position: int) -> Tensor | None:
        """Of order 2, of a gradient that has left the device and is as it came; else None."""
        part = self.parts[position] if self.parts else None
        if part is None or self.buffer.shard_params[position].grad is not part:
            return None
        return self.norms.of(position, part)
