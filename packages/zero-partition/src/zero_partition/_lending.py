"""What an optimizer is shown in the place of gradient shards while it steps."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field
from torch import Tensor

from ._cut import Cut
from ._reduced_shard import ReducedShard

# NOTE(lending): an optimizer that needs more than single elements may take norms, which gradient
# shards refuse, and may divide by a size, which is zero for an empty shard. So while it steps, the
# gradients of parameters with a cut of their own are plain tensors, and None where this rank keeps
# nothing: every optimizer skips a parameter without a gradient. Before and after the step they are
# all there, so that ranks make the same calls (GradScaler's check for inf is a collective).


@define(eq=False)
class Lending:
    """Of one buffer's gradients; see NOTE(lending)."""

    result: ReducedShard
    _structured: tuple[int, ...] = field(init=False)  # parameters with a cut of their own
    _lent: dict[int, Tensor | None] = field(factory=dict, init=False)
    _has_closure: bool = field(default=False, init=False)  # it steps now, and runs backwards

    def __attrs_post_init__(self) -> None:
        plans = enumerate(self.result.buffer.plan.params)
        self._structured = tuple(i for i, plan in plans if plan.cut != Cut.FLAT)

    def begin(self, *, has_closure: bool) -> None:
        """The optimizer steps now, maybe after backwards of its own."""
        self._has_closure = has_closure
        self._lent.clear()
        parts, params = self.result.parts, self.result.buffer.shard_params
        self._lend(i for i in (self._structured if parts else ()) if params[i].grad is parts[i])

    def follow(self, positions: Iterable[int]) -> None:
        """Gradients were handed over: by the backward of a closure, they are lent as well."""
        if self._has_closure:
            self._lend(position for position in positions if position in self._structured)

    def end(self) -> None:
        """The optimizer has stepped."""
        self._has_closure = False
        for position, plain in self._lent.items():
            param = self.result.buffer.shard_params[position]
            if param.grad is plain:  # else the optimizer has dropped it
                param.grad = self.result.parts[position]
        self._lent.clear()

    def forget(self) -> None:
        """The gradients are dropped."""
        self._lent.clear()

    def _lend(self, positions: Iterable[int]) -> None:
        buffer = self.result.buffer
        for position in positions:
            part, shape = self.result.parts[position], buffer.plan.params[position].shape
            is_absent = shape.numel() and not part.numel()
            self._lent[position] = None if is_absent else part.as_subclass(Tensor)
            buffer.shard_params[position].grad = self._lent[position]
