"""One flat buffer at run time: its parameters, this rank's shard, and views of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import Group

from ._buffer_plan import BufferPlan
from ._guards import GradientGuard, placeholder
from ._layout import Piece


@define(eq=False)
class FlatBuffer:
    """A plan, the parameters it places, and the memory that rests on this rank.

    `shard` is this rank's span, padding included. It is memory of its own where parameters rest
    sharded, and a view of `whole` where they rest replicated.
    """

    plan: BufferPlan
    index: int  # among all buffers of the model; the identity of its collectives
    group: Group
    params: tuple[nn.Parameter, ...]
    shard: Tensor
    whole: Tensor | None  # replicated parameters only
    stand_ins: tuple[Tensor, ...] = field(init=False)  # what sharded parameters view at rest
    guards: tuple[Tensor, ...] = field(init=False)  # what `param.grad` holds while it is sharded
    pieces: tuple[Piece, ...] = field(init=False)
    shard_params: tuple[nn.Parameter, ...] = field(init=False)  # one per parameter, maybe empty
    versions: tuple[int, ...] = field(init=False)  # in-place writes autograd has seen

    def __attrs_post_init__(self) -> None:
        self.stand_ins = tuple(
            placeholder(p.shape, p.dtype, self.shard.device) for p in self.plan.params
        )
        self.guards = tuple(GradientGuard.over(stand_in) for stand_in in self.stand_ins)
        self.versions = tuple(param._version for param in self.params)
        self.pieces = self.plan.layout.pieces(self.group.rank)
        self.shard_params = tuple(
            nn.Parameter(part, requires_grad=self.plan.trainable)
            for part in self.parts_of(self.shard)
        )

    @property
    def gather_tag(self) -> int:
        """Identity of its all-gathers."""
        return 2 * self.index

    @property
    def reduce_tag(self) -> int:
        """Identity of its reductions."""
        return 2 * self.index + 1

    def views_of(self, full: Tensor) -> tuple[Tensor, ...]:
        """A full flat tensor of this layout, seen as the parameters."""
        return tuple(
            full[span.as_slice()].view(param.shape)
            for span, param in zip(self.plan.layout.spans, self.plan.params, strict=True)
        )

    def parts_of(self, shard: Tensor) -> tuple[Tensor, ...]:
        """A flat shard of this layout, seen as the optimizer sees it: one tensor per parameter.

        Its shape is what the parameter's cut says; where we keep nothing of it, it is empty.
        """
        parts = [shard[:0].view(p.cut.shard_shape(p.shape, 0)) for p in self.plan.params]
        for piece in self.pieces:
            plan = self.plan.params[piece.index]
            shape = plan.cut.shard_shape(plan.shape, piece.in_tensor.numel)
            parts[piece.index] = shard[piece.in_shard.as_slice()].view(shape)
        return tuple(parts)

    def fill_shard(self, full_values: Sequence[Tensor | None]) -> None:
        """Write this rank's part of the full values given, one per parameter; None leaves as is."""
        with torch.no_grad():
            for piece in self.pieces:
                value = full_values[piece.index]
                if value is not None:
                    part = value.detach().reshape(-1)[piece.in_tensor.as_slice()]
                    self.shard[piece.in_shard.as_slice()].copy_(part)

    def install(self, views: Sequence[Tensor]) -> None:
        """Make the parameters view this memory. Moves no data."""
        for param, view in zip(self.params, views, strict=True):
            param.data = view
