"""In which order buffers are reduced: the same on every rank, whatever comes first on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import define, field
from torch import Tensor

from ._gradients import BufferGradients

# NOTE(order): which buffers are reduced, and in which order, must not depend on which gradients a
# rank happens to have: ranks that wait for each other in different order never end. So every
# trainable buffer is reduced in every backward that reduces, with zeros where nothing arrived, in
# one order: the reverse of the model's at first, and then the order in which rank 0's buffers
# became full. A buffer that is full early waits for its turn.


@define(eq=False)
class ReductionOrder:
    """See NOTE(order)."""

    gradients: Sequence[BufferGradients]
    _order: list[BufferGradients] = field(init=False)
    _is_settled: bool = field(default=False, init=False)
    _num_taken: int = field(default=0, init=False)  # turns, in this backward
    _became_full: list[BufferGradients] = field(factory=list, init=False)  # in this backward

    def __attrs_post_init__(self) -> None:
        self._order = list(reversed(self.gradients))

    def __iter__(self) -> Iterator[BufferGradients]:
        return iter(self._order)

    def turns_after(self, g: BufferGradients) -> Iterator[BufferGradients]:
        """It became full: those that are full, and whose turn it is now."""
        self._became_full.append(g)
        while self._num_taken < len(self._order) and self._order[self._num_taken].is_full:
            self._num_taken += 1
            yield self._order[self._num_taken - 1]

    def forget_turns(self) -> None:
        """The backward has ended."""
        self._num_taken = 0
        self._became_full.clear()

    def settle(self, of_all: Callable[[Tensor], Tensor], *, device: torch.device) -> None:
        """Take rank 0's order of becoming full for the backwards to come. Collective, once.

        Args:
            of_all: Puts the ranks' tensors one after the other.
            device: Where it takes them.
        """
        if self._is_settled:
            return
        numbers = {id(g): number for number, g in enumerate(self.gradients)}
        full = [numbers[id(g)] for g in self._became_full]
        full += [-1] * (len(self.gradients) - len(full))
        mine = torch.tensor(full[: len(self.gradients)], dtype=torch.int64, device=device)
        first = [number for number in of_all(mine)[: len(mine)].tolist() if number >= 0]
        if not first:
            return  # nothing became full on rank 0: too early to say
        rest = [numbers[id(g)] for g in self._order if numbers[id(g)] not in first]
        self._order = [self.gradients[number] for number in dict.fromkeys((*first, *rest))]
        self._is_settled = True
