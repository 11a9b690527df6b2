"""The state of an offloaded optimizer as a mapping, read from where it rests."""

from __future__ import annotations

import weakref
from collections.abc import ItemsView, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

from attrs import field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from ._offloaded import OffloadedOptimizer


@final
@frozen(eq=False)
class StateView(Mapping[Tensor, dict[str, Any]]):
    """`optimizer.state`: copies on the CPU, made at each access. To write: `write_state`."""

    _reference: weakref.ref[OffloadedOptimizer] = field(converter=weakref.ref)

    @property
    def optimizer(self) -> OffloadedOptimizer:
        """Whose state it is; held weakly, or its memory would wait for the garbage collector."""
        optimizer = self._reference()
        if optimizer is None:
            raise ReferenceError("the optimizer of this state is gone; keep the optimizer")
        return optimizer

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        """A copy of a parameter's state."""
        if not any(param is each for each in self.optimizer.started()):
            raise KeyError(f"a parameter of shape {tuple(param.shape)} without state")
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
