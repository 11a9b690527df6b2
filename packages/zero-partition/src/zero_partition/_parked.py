"""What of a model's training state is parked, and where its bytes are meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from enum import Enum

import torch
from attrs import define, field
from torch import Tensor

from ._errors import StateError
from ._parked_tensor import View
from ._torch_compat import has_views


class StateKind(Enum):
    """What training state consists of."""

    PARAMS = "params"  # what rests of parameters: shards at stage 3, whole buffers elsewhere
    MASTERS = "masters"  # what the optimizer updates, where that is not the parameters
    GRADS = "grads"  # gradients that wait for the optimizer, or for their reduction
    OPTIM = "optim"  # the optimizer's own tensors; step counts and other single numbers stay
    BUFFERS = "buffers"  # slots and reduction buffers: given back, and made again when needed


class AbstractKeeper(ABC):
    """Where bytes are while they are parked. Local; used by one thread.

    All tensors are 1-D, uint8, contiguous, on the model's device.
    """

    @abstractmethod
    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Take the room for values of so many bytes, by key: called once, before all else."""

    @abstractmethod
    def keep(self, key: str, source: Tensor, *, waits: bool) -> None:
        """Copy `source`, whose memory is given back to its allocator right afterwards.

        Args:
            key: One that was reserved.
            source: As many bytes as were reserved for it.
            waits: Whether the copy must be done when this returns; else it may be left to the
                current stream.
        """

    @abstractmethod
    def give_back(self, key: str, into: Tensor, *, waits: bool) -> None:
        """Copy what was kept into `into`. After an error it can be asked for again."""

    @abstractmethod
    def close(self) -> None:
        """Release everything: all has been given back, or nobody wants it."""


@define(eq=False)
class ParkedStorage:
    """One storage, and the tensors of ours that view it."""

    key: str
    kind: StateKind
    num_bytes: int
    device: torch.device
    views: list[View]
    storage: torch.UntypedStorage | None  # None: its memory was given back

    @property
    def is_free(self) -> bool:
        """Whether nobody views the memory, now that our tensors do not."""
        return self.storage is not None and not has_views(self.storage)

    def take_away(self) -> None:
        """Let our tensors go."""
        for view in self.views:
            view.take_away()

    def keep(self, keeper: AbstractKeeper, *, waits: bool) -> None:
        """Leave the bytes with the keeper, and give the memory back."""
        assert self.storage is not None, "storages are kept once"
        keeper.keep(self.key, _bytes_of(self.storage), waits=waits)
        self.storage = None

    def put_back(self, keeper: AbstractKeeper, *, waits: bool) -> None:
        """Every view sees its values again."""
        if self.storage is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            keeper.give_back(self.key, memory, waits=waits)
            self.storage = memory.untyped_storage()
        for view in self.views:
            view.put_back(self.storage)


@define(eq=False)
class Parked:
    """The parked state of one model."""

    kinds: frozenset[StateKind]
    keeper: AbstractKeeper
    storages: list[ParkedStorage]
    removers: list[Callable[[], None]] = field(factory=list, init=False)  # of hooks meanwhile

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that were given back."""
        return sum(s.num_bytes for s in self.storages if s.storage is None)

    @property
    def stand_in_bytes(self) -> int:
        """Bytes of what stands in for tensors: one element each."""
        return sum(v.tensor.element_size() for s in self.storages for v in s.views)

    @property
    def gone(self) -> frozenset[int]:
        """Tensors, by id, whose memory was given back."""
        gone = (view for s in self.storages if s.storage is None for view in s.views)
        return frozenset(id(view.tensor) for view in gone)

    def refuse(self, what: str, kinds: Collection[StateKind], *, rank: int) -> None:
        """Raise StateError if it needs something that is parked."""
        gone = [kind.value for kind in StateKind if kind in self.kinds and kind in kinds]
        if gone:
            raise StateError(
                f"{what} needs state that offload_states() has parked: {', '.join(gone)} (rank "
                f"{rank}); call zero_engine.reload_states(model) on every rank first"
            )


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    blank = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return blank.set_(storage)  # type: ignore[call-overload,no-any-return]
