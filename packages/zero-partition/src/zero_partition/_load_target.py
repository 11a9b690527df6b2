"""Where a rank keeps what is read from elsewhere: whole, a part, or nothing yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import Group

from ._early_guards import guard_module
from ._early_shard import find_early, plan_early
from ._grouping import check_parameter
from ._materialise import allocate_blank, allocate_blank_buffer
from ._places import Place, find_place
from ._range_reader import AbstractRangeReader
from ._sharded_model import ShardedModel
from ._span import Span
from ._state_target import CHUNK_BYTES, read_into

NamedReaders: TypeAlias = Mapping[str, AbstractRangeReader]


@define(eq=False)
class Target:
    """One parameter or persistent buffer, and where this rank keeps which part of it."""

    names: tuple[str, ...]  # all it has in `state_dict`
    tensor: Tensor
    parts: list[tuple[Span, Tensor]] = field(factory=list)  # elements, and 1-D memory for them
    place: Place | None = None  # in a model that is sharded: then it has no parts

    @property
    def is_meta(self) -> bool:
        """It has no memory yet."""
        return self.tensor.is_meta

    def given(self, readers: NamedReaders) -> list[str]:
        """Those of its names under which there is something to read."""
        return [name for name in self.names if name in readers]

    def find_parts(self, sharded: ShardedModel | None) -> None:
        """Find what this rank keeps, in a model that is `sharded`, or not. Nothing if on meta."""
        tensor, early, place = self.tensor, find_early(self.tensor), find_place(self.tensor)
        if place is not None and sharded is not None and place.sharded is sharded:
            self.place = place
        elif early is not None:
            assert isinstance(tensor, nn.Parameter), "only parameters are sharded"
            early.check_untouched(tensor, self.names[0])
            self.parts = [(p.in_tensor, early.shard[p.in_shard.as_slice()]) for p in early.pieces]
        elif isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            check_parameter(tensor, self.names[0])
            self.parts = [(Span(0, tensor.numel()), tensor.detach().view(-1))]
        elif not tensor.is_meta:
            self.parts = [(Span(0, tensor.numel()), tensor)]  # a buffer may have any strides

    def spans(self, group: Group) -> list[Span]:
        """The elements that this rank keeps, or is going to."""
        if self.is_meta:
            layout = plan_early(self.tensor.numel(), group)
            return [piece.in_tensor for piece in layout.pieces(group.rank)]
        if self.place is not None and self.place.buffer.whole is not None:
            return [Span(0, self.tensor.numel())]
        if self.place is not None:
            piece = self.place.piece
            return [] if piece is None else [piece.in_tensor]
        return [span for span, _ in self.parts]

    def allocate(self, group: Group) -> None:
        """Give it memory, as `Init` would have left it."""
        if isinstance(self.tensor, nn.Parameter):
            allocate_blank(self.tensor, self.names[0], group=group)
        else:
            allocate_blank_buffer(self.tensor, group=group)
        self.find_parts(None)

    def fill(self, reader: AbstractRangeReader) -> None:
        """Read this rank's part, where it is in no place."""
        for span, memory in self.parts:
            if memory.dim() == 1 and memory.is_contiguous():
                read_into(memory, reader, span)
            else:
                memory.copy_(reader.read(span.start, span.stop).view(memory.shape))
        early = find_early(self.tensor)
        if early is not None:
            if early.is_blank:
                early.shard[early.payload.numel() :].zero_()
            early.is_blank = False


def targets_of(model: nn.Module) -> Iterator[Target]:
    """Every parameter and persistent buffer once, with all its names in `state_dict`."""
    found: dict[int, Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is None or key in module._non_persistent_buffers_set:
                    continue
                target = found.setdefault(id(tensor), Target((), tensor))
                target.names = (*target.names, start + key)
    yield from found.values()


def allocate_missing(model: nn.Module, targets: Iterable[Target], group: Group) -> None:
    """Give what is on the meta device memory."""
    for target in targets:
        if target.is_meta:
            target.allocate(group)
    for module in model.modules():
        if any(p is not None and find_early(p) is not None for p in module._parameters.values()):
            guard_module(module)


def in_chunks(span: Span, dtype: torch.dtype) -> Iterator[Span]:
    """Runs of the span, none larger than a chunk."""
    step = max(1, CHUNK_BYTES // dtype.itemsize)
    for start in range(span.start, span.stop, step):
        yield Span(start, min(start + step, span.stop))
