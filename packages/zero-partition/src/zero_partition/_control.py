"""What the ranks of a model tell each other beside its data: flags, and small numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor
from zero_comm import Group, Handle, all_gather_flat

from ._gradients import BufferGradients


@define(eq=False)
class Control:
    """Exchanges of small tensors among all ranks. Collective."""

    group: Group
    tag: int  # identity of its collectives
    _flags: Handle[Tensor] | None = field(default=None, init=False)  # of arrivals, on their way

    def launch(self, mine: Tensor) -> Handle[Tensor]:
        """A handle of all ranks' tensors of equal size, 1-D, one after the other."""
        shard, world_size = mine.to(self.group.device), self.group.world_size
        return all_gather_flat(
            shard.new_empty(world_size * shard.numel()),
            splits=[shard.numel()] * world_size,
            group=self.group,
            shard=shard,
            tag=self.tag,
            control=True,
        )

    def exchange(self, mine: Tensor) -> Tensor:
        """All ranks' tensors of equal size, 1-D, one after the other."""
        return mine if self.group.world_size == 1 else self.launch(mine).wait()

    def is_true_anywhere(self, mine: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.exchange(torch.tensor([mine], dtype=torch.uint8)).any())

    def agree_on_arrivals(self, gradients: Sequence[BufferGradients]) -> None:
        """A gradient that another rank had and we had not is there all the same, from zeros.

        Every rank says which parameters got one; only a rank that misses some needs the answer,
        so that in the usual case nobody waits.
        """
        if self.group.world_size == 1:
            return
        if self._flags is not None:
            self._flags.wait()
        mine = [param.grad is not None for g in gradients for param in g.targets]
        self._flags = self.launch(torch.tensor(mine, dtype=torch.uint8))
        if all(mine):
            return
        everyone = self._flags.wait().view(self.group.world_size, -1)
        self._flags = None
        anyone = iter(everyone.any(dim=0).tolist())
        for g in gradients:
            for position, param in enumerate(g.targets):
                if next(anyone) and param.grad is None:
                    g.hand_over([position])

    def flags_bytes(self, gradients: Sequence[BufferGradients]) -> int:
        """Bytes of the flags of the last exchange, which nobody may have needed to read."""
        if self._flags is None:
            return 0
        return self.group.world_size * sum(len(g.targets) for g in gradients)
