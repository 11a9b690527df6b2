"""The state of an offloaded optimizer as a mapping, read from where it rests."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from ._offloaded import OffloadedOptimizer


@final
@frozen(eq=False)
class StateView(Mapping[Tensor, dict[str, Any]]):
    """`optimizer.state`: copies on the CPU, made at each access. To write: `write_state`."""

    optimizer: OffloadedOptimizer

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        """A copy of a parameter's state."""
        if param not in self.optimizer.started():
            raise KeyError(param)
        return self.optimizer.read_state([param])[param]

    def __iter__(self) -> Iterator[Tensor]:
        """Parameters that have state."""
        return iter(self.optimizer.started())

    def __len__(self) -> int:
        """How many have."""
        return len(self.optimizer.started())

    def items(self) -> ItemsView[Tensor, dict[str, Any]]:
        """All of it, each sub-group read once."""
        return self.optimizer.read_state(self.optimizer.started()).items()
