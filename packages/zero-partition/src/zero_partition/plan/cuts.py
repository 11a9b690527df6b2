"""Cuts of parameters: where one may be split into shards, and the shapes of its shards."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

from attrs import Attribute, field, frozen
from torch import nn

from zero_partition.errors import LayoutError

_KINDS = ("flat", "row", "tensor", "block")


@frozen
class Cut:
    """Positions at which a parameter may be cut: a promise to the optimizer of its shards.

    `Cut.FLAT` cuts anywhere: right for elementwise optimizers, whose shards are 1-D and even.
    `Cut.ROW` cuts between rows, the slices along the first dim: a shard is `(rows, *shape[1:])`.
    `Cut.TENSOR` never cuts: one rank keeps the parameter in its own shape.
    `Cut.block(k)` cuts on multiples of k elements from the first: a shard is 1-D, and its blocks
    are blocks of the whole. The last one of a parameter may be shorter.
    """

    FLAT: ClassVar[Cut]
    ROW: ClassVar[Cut]
    TENSOR: ClassVar[Cut]

    kind: str = field()
    block_numel: int | None = field(default=None)

    @kind.validator
    def _check_kind(self, _: Attribute, kind: str) -> None:
        if kind not in _KINDS:
            raise LayoutError(f"expected a cut of kind {', '.join(_KINDS)}, got {kind!r}")

    @block_numel.validator
    def _check_block(self, _: Attribute, numel: int | None) -> None:
        is_count = isinstance(numel, int) and not isinstance(numel, bool) and numel >= 1
        if not (is_count if self.kind == "block" else numel is None):
            raise LayoutError(
                f"expected elements per block for a block cut and none for others, got {numel!r} "
                f"for {self.kind!r}; write Cut.block(64) or 'block(64)'"
            )

    @classmethod
    def block(cls, numel: int) -> Cut:
        """Return the cut that allows only multiples of `numel` elements."""
        return cls("block", numel)

    @classmethod
    def parse(cls, value: Cut | str) -> Cut:
        """Return a cut as users write it: "flat", "row", "tensor" or "block(k)".

        Raises:
            LayoutError: `value` is none of these.
        """
        if isinstance(value, Cut):
            return value
        found = isinstance(value, str) and re.fullmatch(r"(\w+)(?:\((\d+)\))?", value.strip())
        if not found or found[1] not in _KINDS:
            raise LayoutError(
                f"expected a Cut, or 'flat', 'row', 'tensor' or 'block(k)', got {value!r}"
            )
        return cls(found[1], int(found[2]) if found[2] else None)

    def __str__(self) -> str:
        return self.kind if self.block_numel is None else f"block({self.block_numel})"

    def grain(self, shape: Sequence[int]) -> int:
        """Return the elements between neighbouring cut positions of a tensor of this shape."""
        numel = math.prod(shape)
        if self.kind == "flat":
            return 1
        if self.block_numel is not None:
            return self.block_numel
        if self.kind == "row" and numel:
            return numel // shape[0] if shape else 1
        return max(numel, 1)

    def shard_shape(self, shape: Sequence[int], numel: int) -> tuple[int, ...]:
        """Return the shape in which the optimizer sees a legal shard of `numel` elements."""
        if self.kind in {"flat", "block"} or (not numel and not shape):
            return (numel,)
        if numel == math.prod(shape):
            return tuple(shape)
        return (numel // self.grain(shape) if self.kind == "row" else 0, *shape[1:])

    def keeps(self, need: Cut, shape: Sequence[int]) -> bool:
        """Return whether shards of this cut suit an optimizer that needs the cut `need`.

        Their shapes, and not only their elements, must suit it. `shape` is the parameter's.
        """
        if self.kind == "tensor" or need.kind == "flat":
            return True
        if need.kind == "block":
            return self.grain(shape) % need.grain(shape) == 0
        if need.kind == "row":
            return self.kind == "row" or len(shape) == 1
        return False


Cut.FLAT, Cut.ROW, Cut.TENSOR = Cut("flat"), Cut("row"), Cut("tensor")


# A user's choice: one cut for all parameters; cuts by name, or by a pattern such as
# "blocks.*.weight", of which the first that matches counts; or a function of a parameter's name and
# the parameter. Cuts may be strings. Without a match, or with None, the optimizer decides.
CutChoice: TypeAlias = (
    Cut | str | Mapping[str, Cut | str] | Callable[[str, nn.Parameter], Cut | str | None] | None
)
